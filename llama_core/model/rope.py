"""The rotary position embedding as a checkpoint describes it. `backends.rotary.rotary_table` has the formula of each kind."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from llama_core.errors import ConfigError

MAX_THETA = 1e12  # of real models: 1e9
MAX_ROPE_FACTOR = 1e6  # and the least is its inverse: frequencies stay finite in float32

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """theta: the base of the frequencies. factor: by how much `kind` stretches the context. original_context: positions that
    the model was trained on before the stretch (dynamic, llama3, yarn, longrope). low_freq_factor, high_freq_factor: llama3's
    bounds on wavelengths. beta_fast, beta_slow, truncate: yarn's bounds on rotations. attention_factor: the multiple of cos and
    sin (yarn, longrope). dim: values at the begin of each head that are rotated; None for all. short_factor, long_factor:
    longrope's divisors of each pair's frequency, for contexts up to the original one and for longer ones.
    """

    kind: RopeKind = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_context: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    dim: int | None = None
    short_factor: tuple[float, ...] = field(default=(), hash=False)
    long_factor: tuple[float, ...] = field(default=(), hash=False)

    def rotated(self, head_dim: int) -> int:
        """Values of a head that are rotated."""
        return head_dim if self.dim is None else self.dim

    def check(self, source: str, head_dim: int | None = None) -> None:
        """Raises ConfigError that names `source` and the field at fault. head_dim: None where it is not known yet."""
        if self.kind not in get_args(RopeKind):
            raise ConfigError(f"{source}: rope type {self.kind!r} is not supported")
        if not 1 < self.theta <= MAX_THETA:
            raise ConfigError(f"{source}: rope theta must be more than 1, at most {MAX_THETA:g}, is {self.theta}")
        named = [(name, getattr(self, name)) for name in _NUMBERS]
        named += [("short_factor", each) for each in self.short_factor]
        named += [("long_factor", each) for each in self.long_factor]
        for name, value in named:
            if not 1 / MAX_ROPE_FACTOR <= value <= MAX_ROPE_FACTOR:
                allowed = f"from {1 / MAX_ROPE_FACTOR:g} to {MAX_ROPE_FACTOR:g}"
                raise ConfigError(f"{source}: rope {name} must be {allowed}, is {value}")
        if self.kind in ("dynamic", "llama3", "yarn", "longrope") and not self.original_context:
            raise ConfigError(f"{source}: rope type {self.kind} needs the original context length")
        if self.kind == "llama3" and self.high_freq_factor < self.low_freq_factor:
            raise ConfigError(f"{source}: rope high_freq_factor must not be less than low_freq_factor")
        if head_dim is None:
            return
        rotated = self.rotated(head_dim)
        if rotated % 2 or not 0 < rotated <= head_dim:
            raise ConfigError(
                f"{source}: {rotated} of {head_dim} values of a head are rotated, which must be an even number"
            )
        if self.kind == "dynamic" and rotated < 4:
            raise ConfigError(f"{source}: {rotated} values of a head are rotated, rope type dynamic needs at least 4")
        for factors in (self.short_factor, self.long_factor) if self.kind == "longrope" else ():
            if len(factors) != rotated // 2:
                raise ConfigError(f"{source}: rope type longrope needs {rotated // 2} factors, has {len(factors)}")
