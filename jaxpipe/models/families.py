"""All model families by name."""

from jaxpipe.models import llama, nemotron_h

FAMILIES = {
    "llama": (llama.LlamaConfig, llama.build),
    "nemotron_h": (nemotron_h.NemotronHConfig, nemotron_h.build),
}
"""Name -> (configuration class, build(config, dtype, tp) -> Model)."""
