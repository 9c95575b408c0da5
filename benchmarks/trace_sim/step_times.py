"""Step times of a profile, by a formula that costs little (pure)."""

from invoker.emulated.profiles import BYTES, Profile


class StepTimes:
    """The same times as `Profile.step_s`, of steps in which `sampled` of the sequences yield a token."""

    def __init__(self, profile: Profile) -> None:
        model, gpu, gpus = profile.model, profile.gpu, profile.gpus
        flops_per_s = gpus * gpu.flops_per_s * gpu.compute
        bytes_per_s = gpus * gpu.memory_bytes_per_s * gpu.memory
        layers = model.layers
        self._token_s = layers * 2 * model.layer_weights / flops_per_s
        self._pair_s = layers * 4 * model.hidden / flops_per_s
        self._weights_s = layers * model.layer_weights * BYTES / bytes_per_s
        self._context_s = layers * model.kv_layer_bytes / bytes_per_s
        self._fixed_s = layers * gpu.kernels_s
        self._exchanged_s = 0.0
        if gpus > 1:
            nbytes = 2 * (gpus - 1) / gpus * model.hidden * BYTES
            self._exchanged_s = layers * 2 * nbytes / gpu.peer_bytes_per_s
            self._fixed_s += layers * 2 * gpu.exchange_s
        self._head_row_s = 2 * model.embedding_weights / flops_per_s
        self._head_s = model.embedding_weights * BYTES / bytes_per_s
        self._kernels_s = gpu.kernels_s

    def step_s(self, tokens: float, sequences: int, context: float, sampled: int) -> float:
        """Return the seconds of a step of `tokens` new tokens after `context` earlier ones in total."""
        pairs = tokens * (context / sequences + (tokens / sequences + 1) / 2)
        computing_s = self._token_s * tokens + self._pair_s * pairs
        reading_s = self._weights_s + self._context_s * (context + tokens)
        taken_s = max(computing_s, reading_s) + self._fixed_s + self._exchanged_s * tokens
        if sampled:
            taken_s += max(self._head_row_s * sampled, self._head_s) + self._kernels_s
        return taken_s
