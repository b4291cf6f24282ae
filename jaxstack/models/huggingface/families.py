"""The families in the order in which an export tries them: the plainest that can express the model comes first."""

from jaxstack.models.huggingface.gemma import GEMMA2, GEMMA3
from jaxstack.models.huggingface.gpt2 import GPT2
from jaxstack.models.huggingface.llama import LLAMA, MISTRAL
from jaxstack.models.huggingface.qwen import QWEN2, QWEN3

FAMILIES = {
    family.model_type: family
    for family in (
        GPT2,
        LLAMA,
        MISTRAL,  # Llama with windows
        QWEN2,  # Llama with biases on queries, keys and values only
        QWEN3,  # normalised heads
        GEMMA2,
        GEMMA3,
    )
}
