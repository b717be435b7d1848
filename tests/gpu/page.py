"""Generated parts of docs/gpu.md: `python -m tests.gpu.page` writes both; it compiles every kernel, for minutes.

They are the table of compiled kernels and the tables of the paper model. Needs triton.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from loadtest.measurement.model_shapes import shape_config
from tests.gpu.compiled_kernels import SHARED_BYTES, Launch, MachineCode, compile_for, launches
from tests.gpu.step_model import BANDWIDTHS, llama_8b, model_table

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"


def replace_part(text: str, name: str, part: str) -> str:
    """Return the text of the page with a new part between the comments of this name."""
    begin, end = f"<!-- {name}: python -m tests.gpu.page -->", f"<!-- end of {name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    assert pattern.search(text), f"{PAGE}: no part {name}"
    return pattern.sub(lambda _: f"{begin}\n{part}\n{end}", text)


def model_part() -> str:
    """Return the tables of the paper model for both shapes on both cards."""
    shapes = {"Qwen2 1.5B": shape_config("qwen2-1.5b"), "Llama 3 8B": llama_8b()}
    return "\n".join(
        f"**{name} on an {card}**\n\n{model_table(config, card)}"
        for name, config in shapes.items()
        for card in BANDWIDTHS
    )


def kernel_part(compiled: Iterable[tuple[Launch, int, MachineCode]]) -> str:
    """Return the table of compiled kernels: the largest numbers of each kernel's variants, per compute capability."""
    rows: dict[str, dict[int, list[MachineCode]]] = {}
    for launch, capability, code in compiled:
        rows.setdefault(launch.name, {}).setdefault(capability, []).append(code)
    versions = " / ".join(f"sm_{capability}" for capability in SHARED_BYTES)
    lines = [
        f"| kernel | variants | registers of a thread: {versions} | shared memory, kB: {versions} | spilled bytes |",
        "|---|---:|---|---|---:|",
    ]
    for name, codes in sorted(rows.items()):
        registers = " / ".join(_largest(codes.get(each), "registers", 1) for each in SHARED_BYTES)
        shared = " / ".join(_largest(codes.get(each), "shared_bytes", 1024) for each in SHARED_BYTES)
        spilled = max(code.spilled_bytes for found in codes.values() for code in found)
        lines.append(f"| {name} | {max(map(len, codes.values()))} | {registers} | {shared} | {spilled} |")
    return "\n".join(lines) + "\n"


def _largest(codes: list[MachineCode] | None, name: str, unit: int) -> str:
    return "–" if codes is None else f"{max(getattr(code, name) for code in codes) / unit:.0f}"


def main() -> None:
    """Compile all kernels for all compute capabilities, and write the generated parts of the page."""
    compiled = [
        (launch, capability, compile_for(launch, capability))
        for capability in SHARED_BYTES
        for launch in launches()
        if capability >= 89 or "fp8" not in launch.case
    ]
    text = replace_part(PAGE.read_text(), "kernels", kernel_part(compiled))
    PAGE.write_text(replace_part(text, "model", model_part()))


if __name__ == "__main__":
    main()
