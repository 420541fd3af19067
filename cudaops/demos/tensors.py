"""`cudaops demo tensors`: is CUDA there, a tensor to the GPU, and a matrix product of integers."""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

import cudaops
from cudaops import launch
from cudaops.demos.checks import Check, progress, verdict
from cudaops.info import obstacle

EXPECTED = [[19, 22], [43, 50]]


def run(console: Console) -> bool:
    """Run the demo; True if the product is right, and ours."""
    table = Table("step", "result", title="tensors", title_justify="left")
    with progress(console) as bar:
        task = bar.add_task("checking CUDA", total=3)
        missing = obstacle()
        if missing is None:
            table.add_row("CUDA", Text(f"available: {torch.cuda.get_device_name()}"))
        else:
            table.add_row("CUDA", Text(f"not available: {missing.reason}"))
            table.add_row("next step", Text(missing.next_step))
        bar.update(task, advance=1, description="moving a tensor")

        device = torch.device("cpu" if missing else "cuda")
        x = torch.tensor([1, 2, 3]).to(device)
        shared = cudaops.to_cupy(x)
        address = shared.__array_interface__["data"][0] if missing else shared.data.ptr
        library = "NumPy" if missing else "CuPy"
        moved = "stays on the CPU: there is no GPU to move it to" if missing else f"is on {x.device}"
        table.add_row("x = torch.tensor([1, 2, 3])", moved)
        table.add_row("cudaops.to_cupy(x)", f"a {library} array at the same address, {address:#x}: nothing is copied")
        bar.update(task, advance=1, description="multiplying integers")

        a = torch.tensor([[1, 2], [3, 4]], device=device)
        b = torch.tensor([[5, 6], [7, 8]], device=device)
        before = launch.total_launches()
        product = cudaops.matmul(a, b)
        launches = launch.total_launches() - before
        where = "in the emulator, on the CPU" if missing else f"on {product.device}"
        table.add_row("cudaops.matmul(a, b), int64", f"{product.tolist()} {where}")
        bar.update(task, advance=1, description="done")
    console.print(table)
    return verdict(
        console,
        [
            Check("no copy to NumPy / CuPy", f"{address:#x}", f"{x.data_ptr():#x}", address == x.data_ptr()),
            Check("[[1,2],[3,4]] @ [[5,6],[7,8]]", str(product.tolist()), str(EXPECTED), product.tolist() == EXPECTED),
            Check("kernels of ours launched for it", str(launches), "1 or more", launches >= 1),
        ],
    )
