"""The profiles of emulated nodes by name, and what follows from one."""

from dataclasses import replace

from invoker.emulated.profiles import (
    A800,
    A800_LINKS,
    BYTES,
    H800,
    LLAMA_2_7B,
    LLAMA_2_13B,
    LLAMA_2_70B,
    LinkRates,
    Profile,
    UnknownProfile,
)

# The 70B model needs 138 GB: the papers ran it on nodes of four GPUs, whose one port serves all of them.
PROFILES = {
    "h800-llama2-7b": Profile(model=LLAMA_2_7B, gpu=H800, gpus=1, links=LinkRates()),
    "h800-llama2-13b": Profile(model=LLAMA_2_13B, gpu=H800, gpus=1, links=LinkRates()),
    "h800-llama2-70b": Profile(model=LLAMA_2_70B, gpu=H800, gpus=4, links=LinkRates()),
    "a800-llama2-13b": Profile(model=LLAMA_2_13B, gpu=A800, gpus=1, links=A800_LINKS),
}


def find_profile(name: str) -> Profile:
    """Return the profile `NAME` or `NAME/SCALE`, as in `h800-llama2-13b/1000`. Raises UnknownProfile."""
    base, slash, scale = name.partition("/")
    known = PROFILES.get(base)
    divisor = int(scale) if scale.isascii() and scale.isdigit() else 0
    if known is None or (slash and divisor < 1):
        raise UnknownProfile(
            f"{name!r} is no profile: use {', '.join(PROFILES)}, with /SCALE for smaller transfers"
        )
    return replace(known, scale=divisor or 1)


def kv_tokens(profile: Profile) -> int:
    """Return how many tokens' K and V fit beside the weights, with a tenth of the memory free."""
    model = profile.model
    free = 0.9 * profile.gpus * profile.gpu.memory_bytes - model.weights * BYTES
    return int(free / (model.layers * model.kv_layer_bytes))


def network_bytes_per_s(profile: Profile) -> float:
    """Return the rate of a node's link, in model time."""
    return profile.links.network / profile.scale
