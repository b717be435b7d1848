"""Types of the tensors of GGUF files: plain numbers, and blocks of quantized numbers. Source: ggml.c of llama.cpp."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorType:
    """Type of a tensor in a GGUF file. A block has `numbers` numbers in `bytes` bytes; a float is a block of one."""

    name: str
    numbers: int
    bytes: int

    @property
    def is_quantized(self) -> bool:
        return self.numbers > 1

    @property
    def has_offset(self) -> bool:
        return self.name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K")

    @property
    def served_bits(self) -> int:
        """Bits of a code in a served matrix whose parts all have this type."""
        return 4 if self.name.startswith("Q4") else 6 if self.name in ("Q5_K", "Q6_K") else 8


TYPES_BY_ID: Mapping[int, TensorType] = {
    0: TensorType(name="F32", numbers=1, bytes=4),
    1: TensorType(name="F16", numbers=1, bytes=2),
    30: TensorType(name="BF16", numbers=1, bytes=2),
    2: TensorType(name="Q4_0", numbers=32, bytes=18),
    3: TensorType(name="Q4_1", numbers=32, bytes=20),
    6: TensorType(name="Q5_0", numbers=32, bytes=22),
    7: TensorType(name="Q5_1", numbers=32, bytes=24),
    8: TensorType(name="Q8_0", numbers=32, bytes=34),
    12: TensorType(name="Q4_K", numbers=256, bytes=144),
    13: TensorType(name="Q5_K", numbers=256, bytes=176),
    14: TensorType(name="Q6_K", numbers=256, bytes=210),
}
TENSOR_TYPES: Mapping[str, TensorType] = {kind.name: kind for kind in TYPES_BY_ID.values()}
TYPE_IDS: Mapping[str, int] = {kind.name: number for number, kind in TYPES_BY_ID.items()}


def joint_bits(names: Collection[str]) -> int:
    """Return the bits of a code in a served matrix whose parts have these types: the most bits of any type.

    Instead of 6 bits, 8 if one of the types is not a K type: a matrix of 6 bits needs the integer scales of K types.
    """
    bits = max(TENSOR_TYPES[name].served_bits for name in names)
    return 8 if bits == 6 and not all(name.endswith("_K") for name in names) else bits
