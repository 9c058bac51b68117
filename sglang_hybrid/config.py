"""The configuration of the package: one frozen, typed object.

Values come from the defaults, then a YAML file, then single ``key=value`` overrides;
the last one wins and the result is checked as a whole. A new setting is one line in
``HybridConfig`` (plus its lines in configs/default.yaml); a condition on settings is
one function in ``_RULES``.
"""

import difflib
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml  # type: ignore[import-untyped,unused-ignore]
from msgspec import Meta
from msgspec import inspect as types

from sglang_hybrid import env
from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.env import ConfigError
from sglang_hybrid.policies.registry import policy_names
from sglang_hybrid.shipped import profile_path

__all__ = ["ConfigError", "HybridConfig", "config_from_environment", "describe", "load_config", "load_with_sources"]

_AUTO_HOST_MEMORY = "70%"
_WORKER_LEGAL = '"auto", "start", "none", or the directory of a running worker, such as "/run/user/1000/worker"'
_HOST_MEMORY_LEGAL = (
    '"auto", a size such as "40GiB", "512MiB" or "1.5GB", '
    'or a percentage of the available memory above 0% and up to 100%, such as "60%"'
)


class HybridConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the backend. Raises ConfigError when built with values that cannot work."""

    policy: Annotated[
        str,
        Meta(
            description="Who computes attention over what: scout attends to the best-scoring blocks within the budget, "
            "full attends to everything and is the exact reference. Other packages may add policies.",
            extra={"legal": "one of full, scout, or a policy of another package"},
        ),
    ] = "scout"
    budget_tokens: Annotated[
        int,
        Meta(
            gt=0,
            description="Tokens attended per (request, layer, KV head) under policy scout. A multiple of 32, the "
            "size of a block, that holds the sink blocks, the recent blocks and the tail (the block being filled).",
        ),
    ] = 2048
    resident_tokens: Annotated[
        int | Literal["auto"],
        Meta(
            description="Tokens per (request, layer, KV head) that are kept resident, sink, recent and tail blocks "
            "included; those are resident in any case. auto is budget_tokens; 0 leaves all others to the worker.",
        ),
    ] = "auto"
    sink_blocks: Annotated[
        int, Meta(ge=0, description="Blocks at the start of a request that are always selected.")
    ] = 1
    recent_blocks: Annotated[
        int, Meta(ge=0, description="Full blocks right before the tail that are always selected.")
    ] = 2
    digest_dtype: Annotated[
        Literal["auto", "model", "int8"],
        Meta(
            description="What digests (channel-wise minimum and maximum of a block's keys) are stored in: the model's "
            "dtype, or int8, which keeps of them what sketches need (the middle of every range in 8 bits; 44 % of a "
            "bfloat16 model's with head_dim 128) and selects nearly the same blocks. int8 needs sketches and a "
            "head_dim that is a multiple of 32. auto is int8 on a GPU, where these are given, and model elsewhere."
        ),
    ] = "auto"
    profile: Annotated[
        str,
        Meta(
            description="File made by sglang-hybrid profile for this model and budget, or the name of one that comes "
            "with the package: the calibrated predictor, and per layer the recall interval and the sticky bonus. none "
            "serves without one."
        ),
    ] = "none"
    prediction: Annotated[
        Literal["auto", "calibrated", "raw", "none"],
        Meta(
            description="Query that misses are selected and computed with, one layer ahead: calibrated (needs a "
            "profile), raw (the next layer's own projection on this layer's input), none (the layer's real query, "
            "computed while the layer waits), or auto (calibrated with a profile, none without)."
        ),
    ] = "auto"
    selection: Annotated[
        Literal["head", "layer"],
        Meta(description="Whether each KV head has its own selection, or all KV heads of a layer share one."),
    ] = "head"
    attend: Annotated[
        Literal["resident", "selected"],
        Meta(
            description="What is attended besides misses, sink, recent and tail blocks: all resident blocks, or only "
            "those that are selected in this step, so that budget_tokens bounds what is attended (ScoutAttention)."
        ),
    ] = "resident"
    sticky_bonus: Annotated[
        float | Literal["auto"],
        Meta(
            description="What resident blocks get on top of their score, in attention logits, so that blocks of nearly "
            "equal scores do not swap at every token. 0 is none; auto takes the profile's, or 1 without a profile.",
        ),
    ] = "auto"
    miss_share: Annotated[
        float | Literal["auto"],
        Meta(
            description="Attention that a selected block must be estimated to get, as a share of its KV head's, to be "
            "computed by the worker. One that is not resident and gets less is left out until a recall. 0 leaves out "
            "none; auto takes the profile's share of each layer and computes every block that gets it, selected or "
            "not (with attend resident), or 0.001 without a profile.",
        ),
    ] = "auto"
    lse_shift: Annotated[
        bool,
        Meta(
            description="Whether the weight of what was computed with a predicted query is corrected once the real "
            "query is there, by what digests and sketches tell of both.",
        ),
    ] = True
    whole_requests: Annotated[
        Literal["auto", "never"],
        Meta(
            description="On a GPU server: auto keeps requests in GPU memory as a whole and attends to all of them, "
            "exactly, while the resident blocks' memory holds all running requests; never selects blocks always."
        ),
    ] = "auto"
    cpu_share: Annotated[
        float | Literal["auto"],
        Meta(
            description="Share of the misses that the worker computes on a GPU server; the others, those with the best "
            "scores, are copied to the GPU and attended there with the real query. 1 is ScoutAttention, 0 leaves the "
            "worker what the GPU has no room for; auto copies only what the worker cannot compute in time.",
        ),
    ] = "auto"
    score_interval: Annotated[
        int | Literal["auto"],
        Meta(
            description="Decode steps between two scorings of all of a layer's blocks, up to 16. In between, hot "
            "blocks are scored (hot_tokens), so a cold one that becomes important is noticed that much later; resident "
            "blocks are attended to anyway, with the real query. auto: 4 where a GPU scores, which "
            "then reads less than half as much of contexts of 16 budgets and more, and 1 elsewhere.",
        ),
    ] = "auto"
    hot_tokens: Annotated[
        int | Literal["auto"],
        Meta(
            description="With score_interval above 1: the tokens of each (row, layer, KV head) whose blocks are scored "
            "at every step, those with the best scores when all were scored. auto: four times the budget. 0: none.",
        ),
    ] = "auto"
    recall_interval: Annotated[
        int | Literal["auto"],
        Meta(
            description="Decode steps between two recalls of a layer, which make its selection resident. 0 is never; "
            "auto takes the profile's, or 8 without a profile.",
        ),
    ] = "auto"
    recall_beta: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="The CPU compute ratio (misses over budget) that recall keeps: profiles choose intervals by "
            "it, and recall_adapt holds it.",
        ),
    ] = 0.12
    recall_adapt: Annotated[
        bool,
        Meta(
            description="Whether recall intervals follow live traffic when its ratio leaves the band below "
            "recall_beta. Intervals that are set by recall_interval stay as they are.",
        ),
    ] = True
    sketch_channels: Annotated[
        int,
        Meta(
            ge=0,
            le=256,
            multiple_of=2,
            description="Channels of every key that are kept beside the minmax digests, in four bits each, so that "
            "selection sees single tokens. 0 is none. 32 cost as much memory as the minmax digests of a bfloat16 model "
            "with head_dim 128.",
            extra={"legal": "an even whole number, >= 0 and <= 256"},
        ),
    ] = 32
    host_memory: Annotated[
        str,
        Meta(
            description='Size of the host pool: "auto" (70 % of the available memory), a size such as "40GiB", '
            'or a percentage of the available memory such as "60%".',
            extra={"legal": _HOST_MEMORY_LEGAL},
        ),
    ] = "auto"
    worker: Annotated[
        str,
        Meta(
            description="The CPU worker that computes attention over misses under policy scout: start (each scheduler "
            "process starts its own and watches it), none (the scheduler process computes them itself), the "
            "directory of a worker started by hand ({rank} stands for the tensor-parallel rank, {replica} for the "
            "replica), or auto: none on a host without a GPU, where it would take the server's own cores, start on a "
            "GPU.",
            extra={"legal": _WORKER_LEGAL},
        ),
    ] = "auto"
    worker_provider: Annotated[
        Literal["native", "torch", "ipex"],
        Meta(description="What the worker computes with: its own kernels, torch's, or Intel's extension for torch."),
    ] = "native"
    worker_threads: Annotated[
        int | Literal["auto"],
        Meta(
            description="Threads of the worker; auto takes one for each physical core it may use, less a quarter of "
            "them, at most four and one for every further rank: SGLang's own processes need those."
        ),
    ] = "auto"
    worker_cores: Annotated[
        str,
        Meta(
            description='Cores that the worker\'s threads are bound to: "auto", "none" (not bound), or a list such as '
            '"0-7,16".',
            extra={"legal": '"auto", "none" or a list of cores such as "0-7,16"; a single one as "3-3"'},
        ),
    ] = "auto"
    worker_deadline_ms: Annotated[
        int,
        Meta(
            ge=1,
            le=2000,
            description="How long a layer waits for the worker. What is not there by then is computed in the scheduler "
            "process.",
        ),
    ] = 500
    worker_restart_seconds: Annotated[
        float,
        Meta(
            gt=0,
            le=3600,
            description="Longest pause before a worker that died is started again; the first ones are shorter.",
        ),
    ] = 5.0

    def __post_init__(self) -> None:
        problems = _problems(msgspec.structs.asdict(self), sources={})
        if problems:
            raise ConfigError(*problems)

    def host_memory_bytes(self, available: int) -> int:
        """Size of the host pool on a machine with ``available`` bytes free. A fixed size may exceed ``available``."""
        amount, unit = _split_size(self.host_memory)
        return int(available * amount / 100) if unit == "%" else int(amount * _UNIT_BYTES[unit])


_FIELDS = {field.name: field for field in msgspec.structs.fields(HybridConfig)}

_UNIT_BYTES = {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)} | {
    f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)
}
# Digits are bounded because Python refuses to convert very long runs of them.
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?(%|[kmgt]i?b)", re.IGNORECASE)


def _split_size(text: str) -> tuple[Fraction, str]:
    match = _SIZE.fullmatch(_AUTO_HOST_MEMORY if text == "auto" else text)
    if match is None:
        raise ValueError(text)
    amount, unit = Fraction(match[1]), match[2].lower()
    if amount == 0 or (unit == "%" and amount > 100):
        raise ValueError(text)
    return amount, unit


# Rules: conditions a field's type cannot express. The parameters name the fields a rule looks at, so that
# it is skipped when one of them has the wrong type already. A rule returns what is legal, or None if all is well.


def _host_memory_is_a_size(host_memory: str) -> str | None:
    try:
        _split_size(host_memory)
    except ValueError:
        return f"must be {_HOST_MEMORY_LEGAL}"
    return None


def _policy_is_registered(policy: str) -> str | None:
    names = policy_names()
    return None if policy in names else f"must be one of {', '.join(names)}"


def _worker_is_a_choice_or_a_directory(worker: str) -> str | None:
    return None if worker in ("auto", "start", "none") or "/" in worker else f"must be {_WORKER_LEGAL}"


def _threads_are_positive(worker_threads: int | str) -> str | None:
    if worker_threads == "auto" or 1 <= int(worker_threads) <= 1024:
        return None
    return 'must be a whole number from 1 to 1024, or "auto"'


def _numbers_are_not_negative(
    sticky_bonus: float | str, recall_interval: int | str, resident_tokens: int | str, hot_tokens: int | str
) -> str | None:
    values = sticky_bonus, recall_interval, resident_tokens, hot_tokens
    if all(value == "auto" or 0 <= float(value) <= 1e9 for value in values):
        return None
    return 'must each be "auto" or a number from 0 on'


def _scores_are_not_too_old(score_interval: int | str) -> str | None:
    return None if score_interval == "auto" or 1 <= int(score_interval) <= 16 else 'must be "auto" or 1 to 16'


def _miss_share_is_a_part(miss_share: float | str) -> str | None:
    return None if miss_share == "auto" or 0 <= float(miss_share) <= 1 else 'must be "auto" or a number from 0 to 1'


def _cpu_share_is_a_part(cpu_share: float | str) -> str | None:
    return None if cpu_share == "auto" or 0 <= float(cpu_share) <= 1 else 'must be "auto" or a number from 0 to 1'


def _calibration_needs_a_profile(prediction: str, profile: str) -> str | None:
    if prediction != "calibrated" or profile != "none":
        return None
    return "calibrated needs a profile: sglang-hybrid profile makes one; or take raw, none or auto"


def _compact_digests_need_sketches(digest_dtype: str, sketch_channels: int) -> str | None:
    if digest_dtype != "int8" or (sketch_channels > 0 and sketch_channels % 8 == 0):
        return None
    return "digest_dtype int8 needs sketch_channels that are a multiple of 8"


def _budget_is_whole_blocks(budget_tokens: int) -> str | None:
    if budget_tokens % BLOCK_TOKENS == 0:
        return None
    rounded_up = -(-budget_tokens // BLOCK_TOKENS) * BLOCK_TOKENS
    return f"must be a multiple of {BLOCK_TOKENS}, the tokens of a block, such as {rounded_up}"


def _budget_holds_what_is_always_selected(budget_tokens: int, sink_blocks: int, recent_blocks: int) -> str | None:
    needed_blocks = sink_blocks + recent_blocks + 1
    if budget_tokens // BLOCK_TOKENS >= needed_blocks:
        return None
    return (
        f"budget_tokens must be at least {needed_blocks * BLOCK_TOKENS} to hold the sink blocks, the recent blocks "
        "and the tail; raise it or lower sink_blocks or recent_blocks"
    )


_RULES: tuple[Callable[..., str | None], ...] = (
    _policy_is_registered,
    _host_memory_is_a_size,
    _worker_is_a_choice_or_a_directory,
    _threads_are_positive,
    _numbers_are_not_negative,
    _scores_are_not_too_old,
    _miss_share_is_a_part,
    _cpu_share_is_a_part,
    _calibration_needs_a_profile,
    _compact_digests_need_sketches,
    _budget_is_whole_blocks,
    _budget_holds_what_is_always_selected,
)


def _problems(values: Mapping[str, Any], sources: Mapping[str, str]) -> list[str]:
    """Everything wrong with a full set of values; ``sources`` says where a value came from, if that is known."""

    def given(key: str) -> str:
        return f"{key}={values[key]!r}" + (f" ({sources[key]})" if key in sources else "")

    problems, mistyped = [], set()
    for key, field in _FIELDS.items():
        try:
            msgspec.convert(values[key], field.type)
        except msgspec.ValidationError:
            mistyped.add(key)
            problems.append(f"{given(key)}: must be {_legal(types.type_info(field.type))}")
    for rule in _RULES:
        keys = list(inspect.signature(rule).parameters)
        if mistyped.isdisjoint(keys) and (broken := rule(*(values[key] for key in keys))):
            problems.append(f"{', '.join(map(given, keys))}: {broken}")
    return problems


def _legal(kind: types.Type) -> str:
    """The legal values of a field's type, in words."""
    match kind:
        case types.Metadata(type=inner, extra=extra):
            return str(extra["legal"]) if extra and "legal" in extra else _legal(inner)
        case types.UnionType(types=members):
            return " or ".join(map(_legal, members))
        case types.LiteralType(values=values):
            return ("one of " if len(values) > 1 else "") + ", ".join(map(str, values))
        case types.IntType() | types.FloatType():
            bounds = {">": kind.gt, ">=": kind.ge, "<": kind.lt, "<=": kind.le}
            limits = [f"{sign} {bound}" for sign, bound in bounds.items() if bound is not None]
            name = "a whole number" if isinstance(kind, types.IntType) else "a number"
            return f"{name} {' and '.join(limits)}".rstrip()
        case types.BoolType():
            return "true or false"
        case types.StrType():
            return "text"
        case types.NoneType():
            return "null"
    raise TypeError(f"a setting has a type without a description in words: {kind}")


class _YamlLoader(yaml.SafeLoader):  # type: ignore[misc,unused-ignore]
    """Safe YAML in which a repeated key is an error: PyYAML would silently keep the last."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # lists and mappings cannot be keys; the constructor says so
            if key.value in seen:
                raise yaml.composer.ComposerError(None, None, f"duplicate key {key.value!r}", key.start_mark)
            seen.add(key.value)
        return node


# PyYAML follows YAML 1.1, where 1e-3 (no dot) is text; everyone means the number.
_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$"), [*"-+0123456789"]
)


def _parse_yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, _YamlLoader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date or number that only looks like one
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        what = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{source}{where}: not valid YAML: {what}") from error


def _read_file(file: Path) -> dict[Any, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"file {file}: does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"file {file}: cannot be read: {error}") from error
    content = _parse_yaml(text, f"file {file}")
    if content is None:  # empty, or comments only
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"file {file}: must hold lines of the form key: value, not a {type(content).__name__}")
    return content


def _read_override(override: str) -> dict[Any, Any]:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"override {override!r}: must have the form key=value")
    return {key.strip(): _parse_yaml(text, f"override {override!r}")}


# Settings of earlier versions: their names of today.
_RENAMED = {"dense": "whole_requests"}

# Settings of earlier versions that are gone: what to do instead.
_REMOVED = {
    "block_tokens": f"blocks have {BLOCK_TOKENS} tokens, which the kernels are compiled for: drop it",
    "worker_group_threads": "the worker divides its threads into groups by itself: drop it",
    "worker_spin_us": "the worker stays awake for 200 us after the last work, and longer if steps need it: drop it",
    "worker_task_blocks": "the worker divides lists into tasks by itself: drop it",
    "digest": "selection scores the minimum and maximum of a block's keys: drop it",
    "digest_spread": "without sketches, scores go half of the way to Quest's upper bound: drop it",
    "sketch_bits": "sketches have four bits a channel: drop it, and set sketch_channels to take less memory",
    "most_budget_tokens": "budgets do not grow while few requests run: drop it, and raise budget_tokens instead",
}


def _unknown_key(key: Any, source: str) -> str:
    if key in _RENAMED:
        return f"{key} ({source}): is called {_RENAMED[key]} now"
    if key in _REMOVED:
        return f"{key} ({source}): was removed; {_REMOVED[key]}"
    nearest = difflib.get_close_matches(str(key), _FIELDS, n=1, cutoff=0.5)
    hint = f", did you mean {nearest[0]}?" if nearest else ";"
    return f"unknown key {key!r} ({source}){hint} legal keys: {', '.join(_FIELDS)}"


def load_with_sources(file: Path | None, overrides: Sequence[str]) -> tuple[HybridConfig, dict[str, str]]:
    """The configuration and, per key, where its value came from: "default", "file NAME" or "override".

    Raises ConfigError with every problem of all sources. Values that a later source replaced are not checked.
    """
    values: dict[str, Any] = {key: field.default for key, field in _FIELDS.items()}
    sources = dict.fromkeys(values, "default")
    problems: list[str] = []

    readers: list[tuple[str, Callable[[], dict[Any, Any]]]] = []
    if file is not None:
        readers.append((f"file {file}", partial(_read_file, file)))
    readers += [("override", partial(_read_override, override)) for override in overrides]
    for source, read in readers:
        try:
            given = read()
        except ConfigError as error:
            problems += error.problems
            continue
        for key, value in given.items():
            if key in _FIELDS:
                values[key], sources[key] = value, source
            else:
                problems.append(_unknown_key(key, source))
    if isinstance(values["profile"], str):
        values["profile"] = profile_path(values["profile"])
    problems += _problems(values, sources)
    if problems:
        raise ConfigError(*problems)
    return msgspec.convert(values, HybridConfig), sources


def load_config(file: Path | None, overrides: Sequence[str]) -> HybridConfig:
    """The configuration from the defaults, then ``file``, then ``key=value`` overrides. Raises ConfigError."""
    return load_with_sources(file, overrides)[0]


def config_from_environment() -> HybridConfig:
    """The configuration that the environment variables of ``sglang_hybrid.env`` ask for. Raises ConfigError."""
    return load_config(env.CONFIG.get(), env.SET.get())


def describe(
    config: HybridConfig, sources: Mapping[str, str] | None = None, resolved: Mapping[str, str] | None = None
) -> str:
    """The effective settings as a YAML file that can be loaded again, each with its description.

    Comments say the source of each value, and what ``resolved`` tells of it (see ``host_settings``).
    """
    paragraphs = []
    for key, value in msgspec.structs.asdict(config).items():
        kind = types.type_info(_FIELDS[key].type)
        description = (kind.extra_json_schema or {}).get("description", "") if isinstance(kind, types.Metadata) else ""
        comment = textwrap.fill(description, width=110, initial_indent="# ", subsequent_indent="# ")
        setting = yaml.safe_dump({key: value}, width=4096).strip()
        notes = [f"{value} -> {resolved[key]}"] if resolved and key in resolved else []
        notes += [sources[key]] if sources else []
        note = f"  # {'; '.join(notes)}" if notes else ""
        paragraphs.append(f"{comment}\n{setting}{note}\n")
    return "\n".join(paragraphs)
