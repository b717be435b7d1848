"""Formats of the matrices of a quantized model: some matrices of an int4 model are int8. Torch-free."""

# Beginnings of the names of matrices that are int8 if the others are int4: the embedding, LM head and first layer. They
# cost most in accuracy; llama.cpp's Q4_K_M has 6 bits in the head and in some matrices of the layers.
_INT8_BESIDE_INT4 = ("token_embedding.", "lm_head.", "layers.0.")
INT4_TEXT = "in groups of 32; int8 in the embedding, LM head and first layer"
# Bytes of a weight and its share of scale and offset: of matrices in groups by the bits of a code, and by kind.
GROUPED_BYTES = {4: 4.75 / 8, 6: 6.5625 / 8, 8: 9 / 8}
QUANTIZED_BYTES = {"int8": 1, "int6": GROUPED_BYTES[6], "int4": GROUPED_BYTES[4]}


def matrix_kind(kind: str, name: str) -> str:
    """Return the format of matrix `name` in a model quantized to `kind`: int8 for some matrices of an int4 model."""
    return "int8" if kind == "int4" and name.startswith(_INT8_BESIDE_INT4) else kind
