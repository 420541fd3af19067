"""Where a warp's turn ends, and how it goes on: barriers, and loops that wait for another warp.

All lanes of a warp that run unmasked stop at one place. In a masked region lanes stop one by one: those at a barrier
or at the head of a waiting loop stay there while the chain of blocks runs on for the others; what is left is looked at
when the chain ends. A lane that holds what others of its warp wait for can so give it back. Lanes at a collective stay
there until its members have come, or nothing else is left that could bring them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cudaops.emulator import layout
from cudaops.emulator.access import Accesses
from cudaops.emulator.control import Region, is_aligned, is_barrier, is_collective, members_of
from cudaops.emulator.layout import BARRIERS, FRAME, WORKER
from cudaops.emulator.options import Checks
from cudaops.emulator.ptx import Imm, Instruction, Operand


class Stops(Accesses):
    regions: list[Region]
    region_of: dict[int, Region]
    needs_live: bool
    given_up: str  # in the block of a collective: it runs though members are missing, which nothing can bring

    def find_stops(self) -> None:
        """What a frame's program counter can stand for: the block of a barrier, the header of a waiting loop, or the
        region that lanes stopped in."""
        masked = self.analysis.masked
        self.barriers = list(self.flow.barriers)
        if self.geometry.warps == 1 and self.checks is not Checks.SANITIZER and not masked.intersection(self.barriers):
            self.barriers = [b for b in self.barriers if not self._is_plain(self.flow.blocks[b].instructions[-1])]
        self.waits = self.flow.waits
        self.stop_regions = [r for r in self.regions if self.flow.stops(r)]
        self.resumes: list[int | Region] = [b for b in self.barriers if b not in masked]
        self.resumes += [header for header in sorted(self.waits) if header not in masked]
        self.resumes += self.stop_regions

    @staticmethod
    def _is_plain(ins: Instruction) -> bool:
        """One warp runs in step, and has come to such a barrier when it is there."""
        return "sync" in ins.parts and len(ins.operands) == 1

    def meetings(self, region: Region) -> list[int]:
        """Blocks of a region that lanes stop in, in which they wait for others of their warp: those of collectives.

        A barrier at which all of a warp should be at once is one for the sanitizer, which sees whether they are, where
        some may be late.
        """
        watched = self.checks is Checks.SANITIZER and any(b in self.waits for b in region.chain)
        found = []
        for b in region.chain if region in self.stop_regions else ():
            first = next(iter(self.flow.blocks[b].instructions), None)
            if first is not None and (is_collective(first) or (watched and is_barrier(first) and is_aligned(first))):
                found.append(b)
        return found

    def live_at_stops(self) -> set[str]:
        """Registers that live across a stop."""
        live = self.flow.live_in
        found: set[str] = set()
        for stop in self.resumes:
            if isinstance(stop, Region):
                after = [b + 1 for b in stop.chain if b in self.barriers] + [b for b in stop.chain if b in self.waits]
                after += self.meetings(stop)
                after += [stop.exit] if stop.exit is not None else []
                found = found.union(*(live[b] for b in after))
            else:
                found |= live[stop if stop in self.waits else stop + 1]
        return found

    def kept_masks(self) -> list[str]:
        """Names of the masks, 4 bytes each, that live across stops: zero when the warp starts."""
        found = []
        for region in self.stop_regions:
            found += [f"m{b}" for b in region.chain if b in self.waits] + [f"m{b}" for b in self.meetings(region)]
            for b in region.chain:
                if b in self.barriers:
                    found += [f"w{b}", f"id{b}"]
        return found

    # -- pieces -----------------------------------------------------------------------------------------------------
    def live_bits(self) -> str:
        return self.bits_of(self.emit("load <32 x i1>, ptr %live, align 4")) if self.needs_live else "-1"

    def _get_frame(self, name: str) -> str:
        return self.emit(f"load i32, ptr {self.emit(f'getelementptr i8, ptr %frame, i64 {FRAME[name]}')}, align 4")

    def _put_frame(self, name: str, value: str) -> None:
        pointer = self.emit(f"getelementptr i8, ptr %frame, i64 {FRAME[name]}")
        self.line(f"store i32 {value}, ptr {pointer}, align 4")

    def _entry(self, base: str, offset: int, number: str, ty: str) -> str:
        """A pointer to element `number`, an i32, of an array of `ty`."""
        array = self.emit(f"getelementptr i8, ptr {base}, i64 {offset}")
        return self.emit(f"getelementptr {ty}, ptr {array}, i32 {number}")

    def _add_to(self, pointer: str, value: str, ty: str) -> None:
        old = self.emit(f"load {ty}, ptr {pointer}, align 2")
        self.line(f"store {ty} {self.binary('add', ty, old, value)}, ptr {pointer}, align 2")

    def _count(self, bits: str) -> str:
        name = self.declare("llvm.ctpop.i32", "i32", "i32")
        return self.emit(f"call i32 @{name}(i32 {bits})")

    def one(self, operand: Operand) -> str:
        """An operand that is the same for all lanes that run this, as a scalar."""
        if self.lanes_of(operand).uniform:
            return self.read(operand, "b32", vector=False)
        value = self.read(operand, "b32", vector=True)
        return self.emit(f"extractelement <32 x i32> {value}, i32 {self.last_active_lane()}")

    def barrier_number(self, ins: Instruction, operand: Operand) -> str:
        if isinstance(operand, Imm) and not 0 <= operand.value < 16:
            self.unsupported(ins, f"barrier {operand.value}, of 16,")
        number = self.one(operand)
        if not isinstance(operand, Imm):
            self._require(ins, f"icmp ult i32 {number}, 16")
        return number

    def _require(self, ins: Instruction, test: str) -> None:
        fine, bad = self.label("fine"), self.label("bad")
        self.line(f"br i1 {self.emit(test)}, label %{fine}, label %{bad}, !prof !0")
        self.place(bad)
        self.fault(ins, layout.ERROR_NUMBER)
        self.line("ret i32 0")
        self.place(fine)

    def arrive(self, ins: Instruction, mask: str) -> str:
        """Take note of the lanes (bits) that come to a barrier; its number."""
        operands = list(ins.operands)
        number = self.barrier_number(ins, operands.pop(0))
        barriers = self.field("barriers", "ptr")
        if "red" in ins.parts:
            p = self.bits_of(self.read(operands.pop(), "pred", vector=True))
            held = self._count(self.binary("and", "i32", p, mask))
            self._add_to(self._entry(barriers, BARRIERS["true"], number, "i32"), held, "i32")
            self._add_to(self._entry(barriers, BARRIERS["lanes"], number, "i32"), self._count(mask), "i32")
        if operands:
            count = operands.pop(0)
            if isinstance(count, Imm) and (count.value % 32 or not 0 < count.value <= 1024):
                self.unsupported(ins, f"a barrier of {count.value} threads, which are no whole warps of a block,")
            threads = self.one(count)
            if not isinstance(count, Imm):  # from 32 on: the rotation brings the low bits to the top
                name = self.declare("llvm.fshr.i32", "i32", "i32, i32, i32")
                warps = self.emit(f"call i32 @{name}(i32 {threads}, i32 {threads}, i32 5)")
                self._require(ins, f"icmp ult i32 {self.binary('sub', 'i32', warps, '1')}, 32")
            expected = self.emit(f"trunc i32 {threads} to i16")
            pointer = self._entry(barriers, BARRIERS["expected"], number, "i16")
            self.line(f"store i16 {expected}, ptr {pointer}, align 2")
        return number

    def arrive_only(self, ins: Instruction) -> None:
        """bar.arrive: a whole warp counts for 32 threads, even where it has fewer."""
        mask = self.bits_of(self.mask_or_full())
        number = self.arrive(ins, mask)
        whole = self.emit(f"icmp eq i32 {mask}, {self.live_bits()}")
        lanes = self.emit(f"select i1 {whole}, i32 32, i32 {self._count(mask)}")
        pointer = self._entry(self.field("barriers", "ptr"), BARRIERS["arrived"], number, "i16")
        self._add_to(pointer, self.emit(f"trunc i32 {lanes} to i16"), "i16")

    def _stand_at(self, ins: Instruction) -> None:
        self._put_frame("site", str(self.site_of(ins)))

    def _end_turn(self, stop: int | Region, outcome: str) -> None:
        self._put_frame("pc", str(self.resumes.index(stop) + 1))
        self._put_frame("live", self._count(self.live_bits()))
        self.line(f"ret i32 {outcome}")

    def _no_counts(self) -> None:
        pointer = self.emit(f"getelementptr i8, ptr %frame, i64 {FRAME['counts']}")
        self.line(f"store <16 x i16> zeroinitializer, ptr {pointer}, align 2")

    def note_progress(self) -> None:
        pointer = self.emit(f"getelementptr i8, ptr %ctx, i64 {WORKER['progress']}")
        self.line(f"store i64 1, ptr {pointer}, align 8")

    def _looked_enough(self) -> str:
        """Whether waiting loops have gone round often enough in this turn."""
        turns = self.binary("add", "i32", self.emit("load i32, ptr %turn, align 4"), "1")
        self.line(f"store i32 {turns}, ptr %turn, align 4")
        return self.emit(f"icmp ugt i32 {turns}, {layout.LOOK_TURNS}")

    def poll(self, code: Sequence[Instruction]) -> None:
        """Count a turn of a loop; end the warp where the launch should stop."""
        pointer = self.emit(f"getelementptr i8, ptr %ctx, i64 {layout.WORKER['budget']}")
        left = self.binary("sub", "i64", self.emit(f"load i64, ptr {pointer}, align 8"), "1")
        self.line(f"store i64 {left}, ptr {pointer}, align 8")
        used = self.emit(f"icmp slt i64 {left}, 0")
        look, go_on = self.label("look"), self.label("on")
        self.line(f"br i1 {used}, label %{look}, label %{go_on}, !prof !1")
        self.place(look)
        function = self.field("poll", "ptr")
        site = self.site_of(code[0]) if code else 0
        stop = self.emit(f"call preserve_allcc i1 {function}(ptr %ctx, i32 {site})")
        self.line(f"br i1 {stop}, label %exit, label %{go_on}")
        self.place(go_on)

    def fault(self, ins: Instruction, kind: int) -> None:
        """Note what went wrong, if it is the worker's first fault."""
        function = self.field("fault", "ptr")
        self.line(f"call preserve_allcc void {function}(ptr %ctx, i64 {kind}, i64 {self.site_of(ins)}, i64 0, i64 0)")

    # -- all live lanes stop ----------------------------------------------------------------------------------------
    def wait_at_barrier(self, b: int) -> None:
        ins = self.flow.blocks[b].instructions[-1]
        live = self.live_bits()
        number = self.arrive(ins, live)
        self._no_counts()
        pointer = self._entry("%frame", FRAME["counts"], number, "i16")
        self.line(f"store i16 {self.emit(f'trunc i32 {self._count(live)} to i16')}, ptr {pointer}, align 2")
        self._stand_at(ins)
        self._end_turn(b, str(layout.WAITS))

    def look_again(self, header: int) -> None:
        """On the way back to the header of a waiting loop: end the turn, now and then."""
        enough, give, again = self._looked_enough(), self.label("give"), self.label("again")
        self.line(f"br i1 {enough}, label %{give}, label %{again}")
        self.place(give)
        if not self.waits[header].only_looks:
            self.note_progress()
        self._put_frame("parked", "0")
        self._no_counts()
        self._stand_at(self.waits[header].look)
        self._end_turn(header, str(layout.LOOPS))
        self.place(again)

    # -- some lanes stop in a region ----------------------------------------------------------------------------------
    def park_at_barrier(self, b: int, mask: str) -> None:
        ins = self.flow.blocks[b].instructions[-1]
        number = self.arrive(ins, self.bits_of(mask))
        self._stand_at(ins)
        self.line(f"store i32 {number}, ptr %id{b}, align 4")
        old = self.emit(f"load i32, ptr %w{b}, align 4")
        self.line(f"store i32 {self.binary('or', 'i32', old, self.bits_of(mask))}, ptr %w{b}, align 4")

    def meet(self, b: int, mask: str, done: str) -> str:
        """Of the lanes that are at a collective, those whose members have all come; the others stay."""
        ins = self.flow.blocks[b].instructions[0]
        elsewhere = self._any(self.emit(f"load i32, ptr %m{o}, align 4") for o in self._same_barrier(b))
        here = self.binary("or", "i32", self.bits_of(mask), elsewhere)
        if elsewhere != "0":  # whoever has been released has not come again
            left = self.emit("load i32, ptr %partners, align 4")
            here = self.binary("and", "i32", here, self.binary("xor", "i32", left, "-1"))
        away = self.binary("and", "i32", self.live_bits(), self.binary("xor", "i32", here, "-1"))
        missing, members = self.splat_value("i32", away), members_of(ins)
        if members is not None:
            named = self.read(members, "b32", vector=True)
            missing = self.binary("and", "<32 x i32>", missing, named)
        ready = self.binary("and", "<32 x i1>", mask, self.emit(f"icmp eq <32 x i32> {missing}, zeroinitializer"))
        if elsewhere != "0":
            ready = self._release(mask, ready, named, elsewhere)
        loose = self.emit("load i32, ptr %loose, align 4")
        self.given_up = self.emit(f"icmp eq i32 {loose}, {b}")
        ready = self.emit(f"select i1 {self.given_up}, <32 x i1> {mask}, <32 x i1> {ready}")
        self.line(f"store i32 {self.emit(f'select i1 {self.given_up}, i32 -1, i32 {loose}')}, ptr %loose, align 4")
        self.line(f"store <32 x i1> {self.binary('xor', '<32 x i1>', mask, ready)}, ptr %m{b}, align 4")
        go_on = self.label("meet")
        some = self.emit(f"icmp ne i32 {self.bits_of(ready)}, 0")
        self.line(f"br i1 {some}, label %{go_on}, label %{done}")
        self.place(go_on)
        return ready

    def _same_barrier(self, b: int) -> list[int]:
        """Other places in b's region at which lanes come to the same barrier of the warp (bar.warp.sync is one)."""
        blocks = self.flow.blocks
        if blocks[b].instructions[0].base != "bar" or b in self.barriers:
            return []
        others = (o for o in self.meetings(self.region_of[b]) if o != b and o not in self.barriers)
        return [o for o in others if blocks[o].instructions[0].base == "bar"]

    def _release(self, mask: str, ready: str, named: str, elsewhere: str) -> str:
        """Lanes of `mask` that may go on: `ready` ones, with whom those elsewhere whom they name go on, and lanes that
        have been released so."""
        released = self.emit("load i32, ptr %partners, align 4")
        free = self.emit(f"bitcast i32 {released} to <32 x i1>")
        first = self.binary("and", "<32 x i1>", ready, self.emit(f"xor <32 x i1> {free}, splat (i1 true)"))
        partners = self.emit(f"select <32 x i1> {first}, <32 x i32> {named}, <32 x i32> zeroinitializer")
        name = self.declare("llvm.vector.reduce.or.v32i32", "i32", "<32 x i32>")
        partners = self.binary("and", "i32", self.emit(f"call i32 @{name}(<32 x i32> {partners})"), elsewhere)
        ready = self.binary("and", "<32 x i1>", mask, self.binary("or", "<32 x i1>", ready, free))
        gone = self.binary("xor", "i32", self.bits_of(ready), "-1")
        left = self.binary("and", "i32", self.binary("or", "i32", released, partners), gone)
        self.line(f"store i32 {left}, ptr %partners, align 4")
        return ready

    def _give_up(self, meetings: dict[int, str], head: str) -> None:
        """Nothing else goes on: run those released from elsewhere, or give up the first of the collectives."""
        first = "-1"
        for b, lanes in reversed(meetings.items()):
            first = self.emit(f"select i1 {self.emit(f'icmp ne i32 {lanes}, 0')}, i32 {b}, i32 {first}")
        partners = self.emit("icmp ne i32 " + self.emit("load i32, ptr %partners, align 4") + ", 0")
        self.line(f"store i32 {self.emit(f'select i1 {partners}, i32 -1, i32 {first}')}, ptr %loose, align 4")
        self.line(f"br label %{head}")

    def stop_region(self, region: Region, head: str, leave: str) -> None:
        """The chain has been run: go round again for lanes in waiting loops, end the turn, or leave the region."""
        headers = [b for b in region.chain if b in self.waits]
        barriers = [b for b in region.chain if b in self.barriers]
        parked = {b: self.emit(f"load i32, ptr %m{b}, align 4") for b in headers}
        held = {b: self.emit(f"load i32, ptr %w{b}, align 4") for b in barriers}
        meeting = {b: self.emit(f"load i32, ptr %m{b}, align 4") for b in self.meetings(region)}
        looping, waiting = self._any(parked.values()), self._any(held.values())
        loops = self.emit(f"icmp ne i32 {looping}, 0")
        some = self.emit(f"icmp ne i32 {self.binary('or', 'i32', looping, waiting)}, 0")
        if meeting:  # those whom others have released at another place come first
            none = self.emit("icmp eq i32 " + self.emit("load i32, ptr %partners, align 4") + ", 0")
            some = self.binary("and", "i1", some, none)
        stop, again, end, alone = self.label("stop"), self.label("again"), self.label("give"), self.label("alone")
        self.line(f"br i1 {some}, label %{stop}, label %{alone}")
        self.place(alone)
        if meeting:
            together, free = self.emit(f"icmp ne i32 {self._any(meeting.values())}, 0"), self.label("free")
            self.line(f"br i1 {together}, label %{free}, label %{leave}")
            self.place(free)
            self.poll(self.flow.blocks[region.chain[0]].instructions)
            self._give_up(meeting, head)
        else:
            self.line(f"br label %{leave}")
        self.place(stop)
        go_on = self.binary("and", "i1", loops, self.emit(f"xor i1 {self._looked_enough()}, true"))
        self.line(f"br i1 {go_on}, label %{again}, label %{end}")
        self.place(again)
        self.poll(self.flow.blocks[region.chain[0]].instructions)
        self.line(f"br label %{head}")
        self.place(end)
        self._no_counts()
        for b, lanes in held.items():
            number = self.emit(f"load i32, ptr %id{b}, align 4")
            count = self.emit(f"trunc i32 {self._count(lanes)} to i16")
            self._add_to(self._entry("%frame", FRAME["counts"], number, "i16"), count, "i16")
        old = self._get_frame("parked")
        moved = self.emit(f"icmp ne i32 {old}, {looping}")
        for b, lanes in parked.items():
            if not self.waits[b].only_looks:
                moved = self.binary("or", "i1", moved, self.emit(f"icmp ne i32 {lanes}, 0"))
        note, on = self.label("note"), self.label("on")
        self.line(f"br i1 {moved}, label %{note}, label %{on}")
        self.place(note)
        self.note_progress()
        self.line(f"br label %{on}")
        self.place(on)
        self._put_frame("parked", looping)
        for b, lanes in parked.items():
            here, on = self.label("here"), self.label("on")
            self.line(f"br i1 {self.emit(f'icmp ne i32 {lanes}, 0')}, label %{here}, label %{on}")
            self.place(here)
            self._stand_at(self.waits[b].look)
            self.line(f"br label %{on}")
            self.place(on)
        outcome = self.emit(f"select i1 {loops}, i32 {layout.LOOPS}, i32 {layout.WAITS}")
        self._end_turn(region, outcome)

    def _any(self, masks: Iterable[str]) -> str:
        total = "0"
        for mask in masks:
            total = mask if total == "0" else self.binary("or", "i32", total, mask)
        return total

    def released_lanes(self, b: int) -> str:
        """The lanes that may go on behind a barrier in a region, as a mask; they no longer wait."""
        released = self._get_frame("released")
        number = self.emit(f"load i32, ptr %id{b}, align 4")
        mine = self.emit(f"trunc i32 {self.binary('lshr', 'i32', released, number)} to i1")
        held = self.emit(f"load i32, ptr %w{b}, align 4")
        self.line(f"store i32 {self.emit(f'select i1 {mine}, i32 0, i32 {held}')}, ptr %w{b}, align 4")
        return self.emit(f"bitcast i32 {self.emit(f'select i1 {mine}, i32 {held}, i32 0')} to <32 x i1>")
