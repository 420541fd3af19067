"""A PTX entry -> LLVM IR for one warp: `i32 warp(ctx, frame, warp index)`, a turn of it (layout.ENDED and so on).

Here is the control flow: blocks and the masks of divergent regions (control.py), and where registers live. Those that
live across a stop (stops.py) have the warp's frame as home, all others an alloca that LLVM's sroa turns into SSA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cudaops.emulator import layout, native
from cudaops.emulator.access import Site
from cudaops.emulator.control import RETURNS, Region, is_aligned, is_barrier, results, sources
from cudaops.emulator.isa import lookup
from cudaops.emulator.lanes import LANE, WARP, Geometry, Lanes
from cudaops.emulator.options import Checks
from cudaops.emulator.ptx import MALFORMED, Function, Instruction, Module, Reg
from cudaops.emulator.schedule import results_at_once, schedule
from cudaops.emulator.stops import Stops
from cudaops.emulator.text import element_bits, integer_text, llvm_type
from cudaops.errors import EmulatorError


@dataclass(frozen=True)
class Generated:
    """IR text of a kernel, and what the runtime needs to know to launch it."""

    ir: str
    symbol: str
    frame_bytes: int
    static_shared_bytes: int
    local_bytes: int  # per thread
    slots: int
    sites: tuple[Site, ...]
    instructions: int
    globals_used: tuple[str, ...]
    prints: bool
    copies: bool  # uses cp.async
    waits: bool  # has a loop that waits for others


class Codegen(Stops):
    def __init__(
        self, module: Module, function: Function, geometry: Geometry, dynamic_shared: int, checks: Checks
    ) -> None:
        super().__init__(module, function, geometry, dynamic_shared, checks)
        self.regions = self.flow.regions(self.analysis.masked)
        self.region_of: dict[int, Region] = {b: r for r in self.regions for b in r.chain}
        self.rank = {b: n for n, b in enumerate(self.flow.reachable)}

    def generate(self, symbol: str) -> Generated:
        flow, analysis = self.flow, self.analysis
        partial = self.geometry.threads % WARP != 0
        leaves = any(
            any(s in flow.lone_return for s in flow.succ[b]) and len(flow.succ[b]) > 1 and b in analysis.divergent
            for b in flow.reachable
        )
        returns = any(
            (flow.blocks[b].instructions and flow.blocks[b].instructions[-1].base in RETURNS)
            or any(s in flow.lone_return for s in flow.succ[b])
            for b in analysis.masked
        )
        self.needs_live = partial or leaves or returns
        self.find_stops()
        self.meeting = {b for region in self.regions for b in self.meetings(region)}
        self._assign_homes()
        self._prologue()
        for b in flow.reachable:
            if b not in analysis.masked and b not in flow.lone_return:
                self._unmasked_block(b)
        for region in self.regions:
            self._region(region)
        self.place("exit")
        self.line("ret i32 0")
        body = "\n".join(self.lines)
        attributes = (
            'attributes #0 = { nounwind alignstack=64 "frame-pointer"="none" "prefer-vector-width"="512" '
            '"min-legal-vector-width"="512" "no-trapping-math"="true" }'
        )
        ir = "\n".join(
            [
                *self.tables.values(),
                *self.hull_tables(),
                *self.declarations.values(),
                *self.helpers.values(),
                f"define i32 @{symbol}(ptr %ctx, ptr %frame, i32 %warp) #0 {{",
                "entry:",
                *self.allocas,
                body,
                "}",
                attributes,
                '!0 = !{!"branch_weights", i32 2000, i32 1}',
                '!1 = !{!"branch_weights", i32 1, i32 2000}',
                "",
            ]
        )
        used = {ins.base for b in flow.reachable for ins in flow.blocks[b].instructions}
        return Generated(
            ir, symbol, self.frame_bytes, self.static_shared_bytes, self.local_bytes,
            len(self.slots) + layout.FIRST_SLOT, tuple(self.sites),
            sum(len(flow.blocks[b].instructions) for b in flow.reachable), tuple(self.globals_used),
            "vprintf" in used, "cp" in used, bool(flow.waits),
        )  # fmt: skip

    def _assign_homes(self) -> None:
        flow = self.flow
        crossing = self.live_at_stops()
        shared = set().union(*(flow.live_in[b] for b in flow.reachable)) if flow.reachable else set()
        self.allocas: list[str] = [
            f"  %{name} = alloca <32 x {element}>, align 64"
            for name, element in (("permute", "i32"), ("cold.places", "i64"), ("cold.value", "i64"), ("wide", "i128"))
        ]
        offset = layout.FRAME_REGISTERS
        initial: list[str] = []
        for name in sorted(shared):
            lanes = self.analysis.lanes.get(name)
            if lanes is None:
                continue
            element = llvm_type(self.function.registers[name])
            pointer = f"%h{len(self.homes)}"
            self.homes[name] = pointer
            ty = self.shape(element, lanes.varying)
            if name in crossing:
                size = max(element_bits(element) // 8, 1) * (WARP if lanes.varying and element != "i1" else 1)
                size = 4 if element == "i1" else size
                align = 64 if lanes.varying and element != "i1" else 8
                offset = -(-offset // align) * align
                self.allocas.append(f"  {pointer} = getelementptr i8, ptr %frame, i64 {offset}")
                offset += max(size, 8)
            else:
                self.allocas.append(f"  {pointer} = alloca {ty}, align 64")
                initial.append(f"store {ty} zeroinitializer, ptr {pointer}, align 1")
        kept = (["live"] if self.needs_live else []) + self.kept_masks() if self.resumes else []
        if self.needs_live and not kept:
            self.allocas.append("  %live = alloca <32 x i1>, align 4")
        for name in kept:
            self.allocas.append(f"  %{name} = getelementptr i8, ptr %frame, i64 {offset}")
            offset += 4
        self.frame_bytes = -(-(offset + 64) // 64) * 64
        self.initial = initial

    def _prologue(self) -> None:
        self.line("%arguments_at = getelementptr i8, ptr %ctx, i64 " + str(layout.WORKER["arguments"]))
        self.line("%arguments = load ptr, ptr %arguments_at, align 8")
        self.line("%shared_at = getelementptr i8, ptr %ctx, i64 " + str(layout.WORKER["shared"]))
        self.line("%shared = load i64, ptr %shared_at, align 8")
        self.line("%slots_at = getelementptr i8, ptr %ctx, i64 " + str(layout.WORKER["slots"]))
        self.line("%slots = load ptr, ptr %slots_at, align 8")
        kept = self.kept_masks()
        for b in sorted(self.analysis.masked):
            if f"m{b}" not in kept:
                self.allocas.append(f"  %m{b} = alloca <32 x i1>, align 4")
                self.line(f"store <32 x i1> zeroinitializer, ptr %m{b}, align 4")
        for text in self.initial:
            self.line(text)
        if self.resumes:
            self.allocas += ["  %turn = alloca i32, align 4", "  %loose = alloca i32, align 4"]
            self.allocas.append("  %partners = alloca i32, align 4")
            self.line("store i32 0, ptr %partners, align 4")
            self.line("store i32 0, ptr %turn, align 4")
            self.line("store i32 -1, ptr %loose, align 4")
            pc = self.emit("load i32, ptr %frame, align 4")
            cases = " ".join(f"i32 {n + 1}, label %resume{n + 1}" for n in range(len(self.resumes)))
            self.line(f"switch i32 {pc}, label %start [ {cases} ]")
            self.place("start")
            for name in kept:
                self.line(f"store i32 0, ptr %{name}, align 4")
        if self.needs_live:
            last = self.geometry.warps - 1
            rest = self.geometry.threads - last * WARP
            if rest < WARP:
                is_last = self.emit(f"icmp eq i32 %warp, {last}")
                some = self.vector_text("i1", [int(lane < rest) for lane in LANE])
                value = self.emit(f"select i1 {is_last}, <32 x i1> {some}, <32 x i1> splat (i1 true)")
            else:
                value = "splat (i1 true)"
            self.line(f"store <32 x i1> {value}, ptr %live, align 4")
        self.block = -1
        self._go(0, None)
        for n, stop in enumerate(self.resumes):
            self.place(f"resume{n + 1}")
            if isinstance(stop, Region):
                for b in stop.chain:
                    if b in self.barriers:
                        self._send(b + 1, self.released_lanes(b))
                self.line(f"br label %b{stop.chain[0]}")
            elif stop in self.barriers:
                self._go(stop + 1, None)
            else:
                self.line(f"br label %b{stop}")

    def _begin(self, b: int) -> None:
        self.block = b
        self.scalars, self.vectors, self.splats = {}, {}, {}

    def _unmasked_block(self, b: int) -> None:
        self.place(f"b{b}")
        self._begin(b)
        self.mask = None
        if self.needs_live:
            self.mask = self.emit("load <32 x i1>, ptr %live, align 4")
        last = self._straight_line(b)
        succ = self.flow.succ[b]
        if last is not None and last.base == "trap":
            self._trap(last)
        elif not succ:
            self.line("br label %exit")
        elif b in self.barriers:
            self.wait_at_barrier(b)
        elif len(succ) == 1:
            self._go(succ[0], self.mask)
        else:
            assert last is not None and last.guard is not None
            self._branch(last.guard, succ)

    def _branch(self, guard: Reg, succ: tuple[int, ...]) -> None:
        """A conditional branch of an unmasked block."""
        if self.lanes_of(guard).uniform:
            p = self.read(guard, "pred", vector=False)
            ways = [self.label("way"), self.label("way")]
            self.line(f"br i1 {p}, label %{ways[0]}, label %{ways[1]}")
            for way, s in zip(ways, succ, strict=True):
                self.place(way)
                self._go(s, self.mask)
            return
        taken = self.read(guard, "pred", vector=True)
        other = self.emit(f"xor <32 x i1> {taken}, splat (i1 true)")
        if self.mask is not None:
            taken = self.binary("and", "<32 x i1>", self.mask, taken)
            other = self.binary("and", "<32 x i1>", self.mask, other)
        gone = [s in self.flow.lone_return for s in succ]
        if all(gone):
            self.line("br label %exit")
            return
        if any(gone):
            stay, s = (other, succ[1]) if gone[0] else (taken, succ[0])
            self.line(f"store <32 x i1> {stay}, ptr %live, align 4")
            go_on = self.label("on")
            self.line(f"br i1 {self._some(stay)}, label %{go_on}, label %exit")
            self.place(go_on)
            self._go(s, stay)
            return
        if succ[0] == succ[1]:
            self._go(succ[0], self.mask)
            return
        region = next(self.region_of[s] for s in succ if s in self.region_of)
        for s, m in zip(succ, (taken, other), strict=True):
            if s in self.region_of:
                self._join_mask(s, m)
        self.line(f"br label %b{region.chain[0]}")

    def _go(self, s: int, mask: str | None) -> None:
        """Jump from unmasked code, with all live lanes."""
        if s in self.flow.lone_return:
            self.line("br label %exit")
        elif s in self.analysis.masked:
            if mask is None and self.needs_live:
                mask = self.emit("load <32 x i1>, ptr %live, align 4")
            self.line(f"store <32 x i1> {mask or 'splat (i1 true)'}, ptr %m{s}, align 4")
            self._poll_if_back(s)
            self.line(f"br label %b{self.region_of[s].chain[0]}")
        else:
            self._poll_if_back(s)
            self.line(f"br label %b{s}")

    def _poll_if_back(self, s: int) -> None:
        """On the way back to a block that came before: count, so that a launch can be stopped, and end if it should."""
        if self.block < 0:
            return
        if self.rank[s] > self.rank[self.block]:
            self._note_entry(s)
            return
        self.poll(self.flow.blocks[s].instructions or self.flow.blocks[self.block].instructions)
        if s in self.waits and s not in self.analysis.masked:
            self.look_again(s)

    def _note_entry(self, s: int) -> None:
        """To come to a waiting loop from elsewhere is to go on."""
        if s in self.waits and self.block not in self.waits[s].blocks:
            self.note_progress()

    def _join_mask(self, s: int, mask: str) -> None:
        old = self.emit(f"load <32 x i1>, ptr %m{s}, align 4")
        self.line(f"store <32 x i1> {self.binary('or', '<32 x i1>', old, mask)}, ptr %m{s}, align 4")

    def _some(self, mask: str) -> str:
        return self.emit(f"icmp ne i32 {self.bits_of(mask)}, 0")

    def _region(self, region: Region) -> None:
        ends: dict[int, list[int]] = {}
        for loop in sorted(region.loops, key=lambda loop: -loop.depth):
            if loop.header not in self.waits:
                ends.setdefault(loop.last, []).append(loop.header)
        for n, b in enumerate(region.chain):
            following = f"b{region.chain[n + 1]}" if n + 1 < len(region.chain) else self._region_end(region)
            self._masked_block(b, following, ends.get(b, []))
        self._place_region_end(region)

    def _region_end(self, region: Region) -> str:
        return f"end{region.chain[0]}"

    def _place_region_end(self, region: Region) -> None:
        self.place(self._region_end(region))
        self._begin(region.chain[-1])
        if region in self.stop_regions:
            leave = self.label("leave")
            self.stop_region(region, f"b{region.chain[0]}", leave)
            self.place(leave)
        if region.exit is None:
            self.line("br label %exit")
            return
        if self.needs_live:
            live = self.emit("load <32 x i1>, ptr %live, align 4")
            on = self.label("on")
            self.line(f"br i1 {self._some(live)}, label %{on}, label %exit")
            self.place(on)
        self._poll_if_back(region.exit)
        self.line(f"br label %b{region.exit}")

    def _masked_block(self, b: int, following: str, headers: Sequence[int]) -> None:
        self.place(f"b{b}")
        self._begin(b)
        mask = self.emit(f"load <32 x i1>, ptr %m{b}, align 4")
        run, done = f"run{b}", f"done{b}"
        self.line(f"br i1 {self._some(mask)}, label %{run}, label %{done}")
        self.place(run)
        self.line(f"store <32 x i1> zeroinitializer, ptr %m{b}, align 4")
        if b in self.meeting:
            mask = self.meet(b, mask, done)
        self.mask = mask
        last = self._straight_line(b)
        succ = self.flow.succ[b]
        if last is not None and last.base == "trap":
            self._trap(last)
        elif b in self.barriers:
            self._divergent_barrier(b, mask)
            self.line(f"br label %{done}")
        else:
            if not succ:
                self._leave(mask)
            elif len(succ) == 1 or succ[0] == succ[1]:
                self._send(succ[0], mask)
            else:
                assert last is not None and last.guard is not None
                taken = self.read(last.guard, "pred", vector=True)
                other = self.emit(f"xor <32 x i1> {taken}, splat (i1 true)")
                self._send(succ[0], self.binary("and", "<32 x i1>", mask, taken))
                self._send(succ[1], self.binary("and", "<32 x i1>", mask, other))
            self.line(f"br label %{done}")
        self.place(done)
        for header in headers:
            again = self.emit(f"load <32 x i1>, ptr %m{header}, align 4")
            go_on = self.label("on")
            back = self.label("back")
            self.line(f"br i1 {self._some(again)}, label %{back}, label %{go_on}")
            self.place(back)
            self.poll(self.flow.blocks[header].instructions)
            self.line(f"br label %b{header}")
            self.place(go_on)
        self.line(f"br label %{following}")

    def _send(self, s: int, mask: str) -> None:
        self._note_entry(s)
        if s in self.flow.lone_return:
            self._leave(mask)
        elif s in self.analysis.masked:
            self._join_mask(s, mask)

    def _leave(self, mask: str) -> None:
        live = self.emit("load <32 x i1>, ptr %live, align 4")
        stay = self.binary("and", "<32 x i1>", live, self.emit(f"xor <32 x i1> {mask}, splat (i1 true)"))
        self.line(f"store <32 x i1> {stay}, ptr %live, align 4")

    def _divergent_barrier(self, b: int, mask: str) -> None:
        """A barrier in divergent code: its lanes wait there. Only .aligned promises that all live ones come at once."""
        ins = self.flow.blocks[b].instructions[-1]
        if self.checks is Checks.SANITIZER and is_aligned(ins):
            missing = self.emit(f"icmp ne i32 {self.live_bits()}, {self.bits_of(mask)}")
            bad, fine = self.label("missing"), self.label("all")
            self.line(f"br i1 {missing}, label %{bad}, label %{fine}")
            self.place(bad)
            self.fault(ins, layout.ERROR_BARRIER)
            self.line("ret i32 0")
            self.place(fine)
        self.park_at_barrier(b, mask)

    def _trap(self, ins: Instruction) -> None:
        self.fault(ins, layout.ERROR_TRAP)
        self.line("ret i32 0")

    def _straight_line(self, b: int) -> Instruction | None:
        """The instructions of a block but for how it ends; returns the last one if it decides that."""
        code = list(self.flow.blocks[b].instructions)
        last = code[-1] if code else None
        if last is not None and (last.base in ("bra", "ret", "exit", "trap") or is_barrier(last)):
            code.pop()
            ending: Instruction | None = last
        else:
            ending = None
        after = set().union(*(self.flow.live_in[s] for s in self.flow.succ[b]))
        if ending is not None:
            after.update(r.name for r in sources(ending))
        code = schedule(code, frozenset(after), results_at_once(native.vector_extension()))
        self.pending = {}
        for ins in code:
            for register in results(ins):
                self.pending[register.name] = self.pending.get(register.name, 0) + 1
        for ins in code:
            self._instruction(ins)
        if ending is not None and is_barrier(ending):
            lookup(ending)
        return ending

    def _instruction(self, ins: Instruction) -> None:
        rule = lookup(ins)
        written = results(ins)
        self.lanes = self.analysis.transfers[id(ins)] if written else Lanes(None)
        # An instruction that writes nothing decides its shape itself.
        self.vector = self.lanes.varying
        if (
            len(written) == 1 and self.lanes.constant and self.lanes.low is not None and ins.base not in ("ld", "mov")
            and written[0].type[0] not in "fp"
        ):  # fmt: skip
            held = llvm_type(written[0].type)
            self._put(written[0], integer_text(held, self.lanes.low), held, vector=False)
            return
        try:
            rule.emit(self, ins)
        except MALFORMED as error:
            raise EmulatorError(
                f"{ins.file}:{ins.line}: PTX instruction `{ins}`: these are not the operands that it should have"
            ) from error
