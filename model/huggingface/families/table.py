"""Table of the supported model families."""

from collections.abc import Mapping

from model.huggingface.families.family import ModelFamily
from model.huggingface.families.gemma import GEMMA
from model.huggingface.families.gemma3 import GEMMA3
from model.huggingface.families.gpt import GPT2, GPT_NEOX
from model.huggingface.families.granite import GRANITE
from model.huggingface.families.llama_like import LLAMA_LIKE
from model.huggingface.families.mixture import MIXTURES
from model.huggingface.families.phi3 import PHI3
from model.huggingface.families.smollm3 import SMOLLM3
from model.huggingface.families.stablelm import STABLELM
from model.huggingface.families.starcoder2 import STARCODER2

FAMILIES: Mapping[str, ModelFamily] = {
    family.model_type: family
    for family in (
        GPT2,
        *LLAMA_LIKE,
        *GEMMA,
        *GEMMA3,
        SMOLLM3,
        PHI3,
        GRANITE,
        *MIXTURES,
        STABLELM,
        STARCODER2,
        GPT_NEOX,
    )
}
