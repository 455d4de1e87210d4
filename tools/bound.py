"""What a conversion takes beside what its products and the disk alone would: `surgery convert` on a random shape.

    PYTHONPATH=. OMP_NUM_THREADS=1 python tools/bound.py llama3-8b FOLDER --layers 4 -- --to lowrank --kv-ratio 0.25

``--hollow`` leaves holes in the files where weights are of MLPs or experts: zeros, which cost no disk here, nor in a
result on a file system that compresses.

What follows ``--`` is of ``surgery convert``. Products are those that the dry run counts, at rates that the machine has
for large ones in each dtype, before and after. Their time and the conversion's are those of the processor, which other
work on the machine does not lengthen; the disk's is for what went past the page cache, at rates measured here.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
from scale import make_hollow

from surgery.bench.convert import make_random_checkpoint, random_tensor
from surgery.bench.shapes import SHAPES
from surgery.checkpoint.disk import write_at
from surgery.checkpoint.safetensors_format import read_header
from surgery.checkpoint.tensors import TensorSpec, as_bytes
from surgery.common.human import duration, size
from surgery.common.progress import Progress

IN_FLOAT32, IN_FLOAT64 = "moments", "algebra in float64"
"""Parts of the work that are not in the dtype that layers run in."""
HOLLOW = {"mlp", "experts"}
PRODUCT, PROBE = (1024, 4096, 4096), 2**28


def make_mostly_hollow(folder: Path, config: dict) -> None:
    """Writes a checkpoint of random weights, but for MLPs and experts: holes."""
    make_hollow(folder, config)
    generator = torch.Generator().manual_seed(0)
    for file in sorted(folder.glob("*.safetensors")):
        for name, (info, offset) in read_header(folder, file.name).items():
            if not HOLLOW & set(name.split(".")):
                tensor = random_tensor(name, TensorSpec(info.dtype, info.shape), generator)
                write_at(file, offset, memoryview(as_bytes(tensor).numpy()))


def flops_per_second(dtype: torch.dtype) -> float:
    """Of one large product, by seconds of the processor."""
    rows, inner, columns = PRODUCT
    one, other = torch.randn(rows, inner).to(dtype), torch.randn(columns, inner).to(dtype)
    _ = one @ other.T
    began, runs = time.process_time(), 0
    while time.process_time() - began < 1 or runs < 2:
        _ = one @ other.T
        runs += 1
    return 2 * rows * inner * columns * runs / (time.process_time() - began)


def disk_rates(source: Path, folder: Path) -> tuple[float, float]:
    """Bytes a second that are read of a file that is not in memory, and written to the disk."""
    with open(next(source.glob("*.safetensors")), "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began, read = time.perf_counter(), 0
        while read < PROBE and (block := file.read(2**24)):
            read += len(block)
        reading = read / (time.perf_counter() - began)
    block, probe = os.urandom(2**24), folder / "probe"
    began = time.perf_counter()
    with open(probe, "wb") as file:
        for _ in range(PROBE // len(block)):
            file.write(block)
        os.fsync(file.fileno())
    writing = PROBE / (time.perf_counter() - began)
    probe.unlink()
    return reading, writing


def convert(*arguments: object) -> tuple[dict, resource.struct_rusage, float]:
    """What `surgery convert --json` prints, what its process used, and its seconds by the clock."""
    command = [sys.executable, "-m", "surgery", "convert", *map(str, arguments), "--json"]
    began, process = time.perf_counter(), subprocess.Popen(command, stdout=subprocess.PIPE)
    printed = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    if status:
        sys.exit("the conversion failed")
    return json.loads(printed), used, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("shape", choices=sorted(SHAPES), metavar="SHAPE")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--hollow", action="store_true", help="weights of MLPs are zeros, and holes in the files")
    parser.add_argument("--dtype", default="bfloat16", help="that layers run in")
    own, options = sys.argv[1:], []
    if "--" in own:
        own, options = own[: own.index("--")], own[own.index("--") + 1 :]
    said = parser.parse_args(own)
    config = SHAPES[said.shape] | ({"num_hidden_layers": said.layers} if said.layers else {})
    source, out = said.folder / f"{said.shape}-{config['num_hidden_layers']}", said.folder / "out"
    if not source.exists():
        said.folder.mkdir(parents=True, exist_ok=True)
        if said.hollow:
            make_mostly_hollow(source, config)
        else:
            make_random_checkpoint(source, config, Progress())
    asked = [source, "--out", out, "--overwrite", "--dtype", said.dtype, "--device", "cpu", *options]
    foreseen, _, _ = convert(*asked, "--dry-run")
    dtypes = {"": getattr(torch, said.dtype), IN_FLOAT32: torch.float32, IN_FLOAT64: torch.float64}
    before = {part: flops_per_second(dtype) for part, dtype in dtypes.items()}
    reading, writing = disk_rates(source, said.folder)
    report, used, seconds = convert(*asked)
    rates = {part: (before[part] + flops_per_second(dtype)) / 2 for part, dtype in dtypes.items()}
    flops = {part: foreseen["work"]["flops"].get(part, 0) for part in (IN_FLOAT32, IN_FLOAT64)}
    flops[""] = sum(foreseen["work"]["flops"].values()) - sum(flops.values())
    products = sum(count / rates[part] for part, count in flops.items())
    read, written = 512 * used.ru_inblock, 512 * used.ru_oublock
    disk = read / reading + written / writing
    processor = used.ru_utime + used.ru_stime
    for part, dtype in dtypes.items():
        print(f"{dtype}: {flops[part] / 1e12:.1f} TFLOP at {rates[part] / 1e9:.0f} GFLOP/s")
    print(f"disk: {size(read)} read at {size(reading)}/s, {size(written)} written at {size(writing)}/s")
    print(f"products take {duration(products)}, the disk {duration(disk)}")
    print(f"the processor took {duration(processor)}: {(processor + disk) / (products + disk):.2f} times both")
    for phase, spent in report["seconds"].items():
        print(f"  {phase}: {duration(spent)} by the clock, {size(report['phase_peak_bytes'][phase])} at most")
    print(f"{duration(seconds)} by the clock, {size(1024 * used.ru_maxrss)} of memory at most", end="")
    print(f"; the dry run says {size(foreseen['memory']['host_bytes'])}")


if __name__ == "__main__":
    main()
