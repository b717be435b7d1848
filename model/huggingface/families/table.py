"""Table of the supported model families."""

from collections.abc import Mapping
from pathlib import Path

from model.huggingface.families.bloom import BLOOM
from model.huggingface.families.cohere import COHERE
from model.huggingface.families.falcon import FALCON
from model.huggingface.families.gemma.gemma import GEMMA
from model.huggingface.families.gemma.gemma3 import GEMMA3
from model.huggingface.families.gemma.gemma4 import GEMMA4
from model.huggingface.families.gpt import GPT2, GPT_NEOX
from model.huggingface.families.granite import GRANITE
from model.huggingface.families.hunyuan import HUNYUAN
from model.huggingface.families.llama import LLAMA_LIKE
from model.huggingface.families.mistral3 import MISTRAL3
from model.huggingface.families.mixture import MIXTURES
from model.huggingface.families.opt import OPT
from model.huggingface.families.phi3 import PHI3
from model.huggingface.families.post_norm import POST_NORM
from model.huggingface.families.reading.family import ModelFamily
from model.huggingface.families.smollm3 import SMOLLM3
from model.huggingface.families.stablelm import STABLELM
from model.huggingface.families.starcoder2 import STARCODER2

# Dates, as in 2026-11-28, of the last proof of each family's parity with the transformers library, by `model_type` and
# check. `make families` writes the file after its tests. A test keeps its families equal to those of the table.
PROOFS_FILE = Path(__file__).parents[1] / "family_proofs.json"
FAMILIES: Mapping[str, ModelFamily] = {
    family.model_type: family
    for family in (
        GPT2,
        *LLAMA_LIKE,
        *POST_NORM,
        *GEMMA,
        *GEMMA3,
        *GEMMA4,
        SMOLLM3,
        PHI3,
        GRANITE,
        *MIXTURES,
        HUNYUAN,
        *MISTRAL3,
        *COHERE,
        STABLELM,
        STARCODER2,
        GPT_NEOX,
        OPT,
        BLOOM,
        FALCON,
    )
}
