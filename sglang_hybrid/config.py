"""The configuration of the package: one frozen, typed object, with a section for each policy that has settings.

Values come from the defaults, then a YAML file, then single ``key=value`` overrides. The last source of a value wins,
and the result is checked as a whole. A file has a policy's section as a mapping under the policy's name; elsewhere the
settings of a section have dotted keys::

    scout:                                # --hybrid scout.recall_interval=3
      recall_interval: 3

To add a setting, add one field: to ``HybridConfig`` if every policy can have the setting, otherwise to the struct that
its policy registers (see ``policies.registry``). Then run ``python tools/generate_docs.py``, which updates
configs/default.yaml and docs/configuration.md. A condition on several settings is one function in ``_RULES``.
"""

import difflib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import yaml  # type: ignore[import-untyped,unused-ignore]
from msgspec import Meta
from msgspec.structs import FieldInfo

from sglang_hybrid import env
from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.config_history import what_became_of
from sglang_hybrid.config_sources import read_file, read_override
from sglang_hybrid.env import ConfigError
from sglang_hybrid.policies.registry import has_policy, policies_with_settings, policy_named, policy_names
from sglang_hybrid.policies.scout.options import ScoutOptions
from sglang_hybrid.setting_fields import default_of, description_of, fields_of, legal_values_of
from sglang_hybrid.shipped import profile_path

__all__ = ["ConfigError", "HybridConfig", "config_from_environment", "describe", "load_config", "load_with_sources"]

_AUTO_HOST_MEMORY = "70%"
_WORKER_LEGAL = '"auto", "start", "none", or the directory of a running worker, such as "/run/user/1000/worker"'
_HOST_MEMORY_LEGAL = (
    '"auto", a size such as "40GiB", "512MiB" or "1.5GB", '
    'or a percentage of the available memory above 0% and up to 100%, such as "60%"'
)


S = TypeVar("S", bound=msgspec.Struct)


class HybridConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of the backend. The constructor raises ConfigError for values that cannot work."""

    policy: Annotated[
        str,
        Meta(
            description="What is attended, and who computes: scout attends to the best-scoring blocks within the "
            "budget, full to everything; the others are papers' policies.",
            extra={
                "legal": "one of full, hcattention, hgca, infinigen, scout, scoutattention, or one of another package"
            },
        ),
    ] = "scout"
    budget_tokens: Annotated[
        int,
        Meta(
            gt=0,
            description="Tokens attended per (request, layer, KV head) under policies that select; tokens of GPU "
            "memory per request under full. A multiple of 32, the size of a block, that holds sink, recent and tail "
            "blocks.",
        ),
    ] = 2048
    sink_blocks: Annotated[
        int, Meta(ge=0, description="Blocks at the start of a request that are always selected.")
    ] = 1
    recent_blocks: Annotated[
        int, Meta(ge=0, description="Full blocks before the tail (the block being filled) that are always selected.")
    ] = 2
    digest_dtype: Annotated[
        Literal["auto", "model", "int8"],
        Meta(
            description="Storage of digests: the model's dtype, or int8, which takes less than half of the memory "
            "and needs sketches and a head_dim that is a multiple of 32. auto is int8 on a GPU where possible, model "
            "elsewhere."
        ),
    ] = "auto"
    profile: Annotated[
        str,
        Meta(
            description="Calibration of predictions and infinigen's skew: auto (the server fits them at its first "
            "start with a model, and keeps them), a file made by sglang-hybrid profile for this model and budget, the "
            "name of a shipped one, or none. default is auto on a GPU and none elsewhere.",
            extra={"legal": '"default", "auto", "none", a file, or the name of a shipped profile'},
        ),
    ] = "default"
    prediction: Annotated[
        Literal["auto", "calibrated", "raw", "none"],
        Meta(
            description="Query that selects and computes misses one layer ahead: calibrated, raw (the next layer's "
            "projection of this layer's input), none (the layer's real query, later), or auto (calibrated with "
            "a profile, none without)."
        ),
    ] = "auto"
    whole_requests: Annotated[
        Literal["auto", "never"],
        Meta(
            description="auto keeps whole requests in GPU memory and attends to them exactly while all running "
            "requests fit; never leaves them in host memory."
        ),
    ] = "auto"
    sketch_channels: Annotated[
        int,
        Meta(
            ge=0,
            le=256,
            multiple_of=2,
            description="Channels of every key that are kept in four bits each, so that selection sees single tokens.",
            extra={"legal": "an even whole number, >= 0 and <= 256"},
        ),
    ] = 32
    host_memory: Annotated[
        str,
        Meta(
            description='Size of the host pool. "auto" is 70 % of the available memory.',
            extra={"legal": _HOST_MEMORY_LEGAL},
        ),
    ] = "auto"
    worker: Annotated[
        str,
        Meta(
            description="CPU worker that computes misses: start (each scheduler process starts one), none (the "
            "scheduler process computes), or the directory of a worker started by hand, in which {rank} and {replica} "
            "are replaced. auto is start on a GPU and none elsewhere.",
            extra={"legal": _WORKER_LEGAL},
        ),
    ] = "auto"
    worker_provider: Annotated[
        Literal["native", "torch", "ipex"],
        Meta(description="The worker's kernels: its own, torch's, or those of Intel's extension for torch."),
    ] = "native"
    worker_threads: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | Literal["auto"],
        Meta(
            description="Threads of the worker. auto takes the physical cores less a quarter, at most four, and "
            "less one for every further rank."
        ),
    ] = "auto"
    worker_cores: Annotated[
        str,
        Meta(
            description='Cores to bind the worker\'s threads to: "auto", "none", or a list such as "0-7,16".',
            extra={"legal": '"auto", "none" or a list of cores such as "0-7,16"; a single one as "3-3"'},
        ),
    ] = "auto"
    worker_deadline_ms: Annotated[
        int,
        Meta(
            ge=1,
            le=2000,
            description="How long a layer waits for the worker before the scheduler process computes instead.",
        ),
    ] = 500
    worker_restart_seconds: Annotated[
        float,
        Meta(
            gt=0,
            le=3600,
            description="Longest pause before a dead worker is started again; the first ones are shorter.",
        ),
    ] = 5.0

    # Settings of policies, by the policy's name: an instance of the struct that the policy registered. The constructor
    # accepts mappings too and converts them to structs. A section with only default values is left out.
    sections: dict[str, Any] = {}

    def __post_init__(self) -> None:
        values = {key: getattr(self, key) for key in _FIELDS}
        failed = _load_policies(self.sections)
        for name, section in self.sections.items():
            if name in failed:
                continue
            given = section if isinstance(section, Mapping) else msgspec.structs.asdict(section)
            values |= {f"{name}.{key}": value for key, value in given.items()}
        problems = [*failed.values(), *_problems(values, {})]
        if problems:
            raise ConfigError(*problems)
        sections = _nested(values)["sections"]
        typed = {name: msgspec.convert(given, policy_named(name).settings) for name, given in sections.items()}
        changed = {name: section for name, section in typed.items() if section != type(section)()}
        msgspec.structs.force_setattr(self, "sections", changed)

    def section(self, settings: type[S]) -> S:
        """Return the section of the policy that registered ``settings``."""
        for section in self.sections.values():
            if type(section) is settings:
                return section
        return settings()

    def with_section(self, section: msgspec.Struct) -> "HybridConfig":
        """Return a copy in which ``section`` replaces the section of the policy that registered its type."""
        (name,) = (policy.name for policy in policies_with_settings() if policy.settings is type(section))
        return msgspec.structs.replace(self, sections={**self.sections, name: section})

    @property
    def profile_file(self) -> str | None:
        """Return the name of the profile's file, or None if ``profile`` is default, auto or none."""
        return None if self.profile in ("default", "auto", "none") else self.profile

    @property
    def scout(self) -> ScoutOptions:
        """Return the settings of policy scout."""
        return self.section(ScoutOptions)

    def by_key(self) -> dict[str, Any]:
        """Return every setting by its key. Settings of all loaded policies have keys of the form ``policy.setting``."""
        values = {key: getattr(self, key) for key in _FIELDS}
        policy_named(self.policy)  # loads the policy, so that its section is known
        for policy in policies_with_settings():
            assert policy.settings is not None
            section = msgspec.structs.asdict(self.section(policy.settings))
            values |= {f"{policy.name}.{key}": value for key, value in section.items()}
        return values

    def host_memory_bytes(self, available: int) -> int:
        """Return the host pool's size in bytes with ``available`` bytes free. A fixed size may exceed ``available``."""
        amount, unit = _split_size(self.host_memory)
        return int(available * amount / 100) if unit == "%" else int(amount * _UNIT_BYTES[unit])


_FIELDS = {key: field for key, field in fields_of(HybridConfig).items() if key != "sections"}  # fields of the top level

_UNIT_BYTES = {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)} | {
    f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)
}
# The number of digits is bounded because Python refuses to convert very long numbers.
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?(%|[kmgt]i?b)", re.IGNORECASE)


def _split_size(text: str) -> tuple[Fraction, str]:
    match = _SIZE.fullmatch(_AUTO_HOST_MEMORY if text == "auto" else text)
    if match is None:
        raise ValueError(text)
    amount, unit = Fraction(match[1]), match[2].lower()
    if amount == 0 or (unit == "%" and amount > 100):
        raise ValueError(text)
    return amount, unit


# Rules: conditions that a field's type cannot express. The parameters of a rule name the fields that the rule checks;
# the rule is skipped if one of these fields has the wrong type. A rule returns the legal values in words, or None if
# the condition holds.


def _host_memory_is_a_size(host_memory: str) -> str | None:
    try:
        _split_size(host_memory)
    except ValueError:
        return f"must be {_HOST_MEMORY_LEGAL}"
    return None


def _policy_is_registered(policy: str) -> str | None:
    return None if has_policy(policy) else f"must be one of {', '.join(policy_names())}"


def _worker_is_a_choice_or_a_directory(worker: str) -> str | None:
    return None if worker in ("auto", "start", "none") or "/" in worker else f"must be {_WORKER_LEGAL}"


def _calibration_needs_a_profile(prediction: str, profile: str) -> str | None:
    if prediction != "calibrated" or profile != "none":
        return None
    return "calibrated needs a profile: profile=auto fits a predictor at the start; or take raw, none or auto"


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
    _calibration_needs_a_profile,
    _compact_digests_need_sketches,
    _budget_is_whole_blocks,
    _budget_holds_what_is_always_selected,
)


# A key is a field's name at the top level, and ``policy.setting`` for a setting of a policy. Values and their sources
# are kept in dicts by key until all values are checked.


def _section_of(key: Any) -> str | None:
    """Return the section of a dotted key, or None for a key without a dot."""
    name, dot, _ = str(key).partition(".")
    return name if dot else None


def _load_policies(names: Iterable[str]) -> dict[str, str]:
    """Import the packages of these policies. Return an error message for each policy that failed, by its name."""
    problems = {}
    for name in names:
        try:
            policy_named(name)
        except Exception as error:  # the import of another package may raise anything
            problems[name] = f"policy {name} cannot be loaded: {type(error).__name__}: {error}"
    return problems


def _known_fields() -> dict[str, FieldInfo]:
    """Return the fields of the top level and of the sections of all loaded policies, by key."""
    fields = dict(_FIELDS)
    for policy in policies_with_settings():
        assert policy.settings is not None
        fields |= {f"{policy.name}.{key}": field for key, field in fields_of(policy.settings).items()}
    return fields


def _problems(values: Mapping[Any, Any], sources: Mapping[str, str]) -> list[str]:
    """Return all problems of a full set of values. ``sources`` names the source of a value, where it is known."""

    def given(key: str) -> str:
        return f"{key}={values[key]!r}" + (f" ({sources[key]})" if key in sources else "")

    problems, mistyped, fields = [], set(), _known_fields()
    for key, value in values.items():
        if key not in fields:
            problems.append(_unknown_key(key, sources.get(key), fields))
            continue
        try:
            msgspec.convert(value, fields[key].type)
        except msgspec.ValidationError:
            mistyped.add(key)
            problems.append(f"{given(key)}: must be {legal_values_of(fields[key])}")
    for rule in _RULES:
        keys = list(inspect.signature(rule).parameters)
        if mistyped.isdisjoint(keys) and (broken := rule(*(values[key] for key in keys))):
            problems.append(f"{', '.join(map(given, keys))}: {broken}")
    return problems or _problems_of_sections(values)


def _problems_of_sections(values: Mapping[str, Any]) -> list[str]:
    """Return the problems that the constructors of the policies' structs report. All values have the right types."""
    problems = []
    for name, section in _nested(values)["sections"].items():
        try:
            msgspec.convert(section, policy_named(name).settings)
        except msgspec.ValidationError as error:
            problems.append(f"section {name}: {error}")
    return problems


def _unknown_key(key: Any, source: str | None, fields: Mapping[str, FieldInfo]) -> str:
    where = f" ({source})" if source else ""
    if advice := what_became_of(key):
        return f"{key}{where}: {advice}"
    nearest = difflib.get_close_matches(str(key), fields, n=1, cutoff=0.5)
    hint = f", did you mean {nearest[0]}?" if nearest else ";"
    section = _section_of(key)
    sections = [policy.name for policy in policies_with_settings()]
    if section in sections:
        return f"unknown key {key!r}{where}{hint} legal keys: {', '.join(_keys_of(section, fields))}"
    if section and has_policy(section):
        return f"{key}{where}: policy {section} has no settings"
    legal = f"legal keys: {', '.join(_keys_of(None, fields))}; sections: {', '.join(sections)}"
    return f"unknown key {key!r}{where}{hint} {legal}"


def _keys_of(section: str | None, fields: Iterable[str]) -> list[str]:
    return [key for key in fields if _section_of(key) == section]


def _by_key(content: Mapping[Any, Any], source: str) -> tuple[dict[Any, Any], list[str]]:
    """Return the settings of a source, those of sections by dotted keys, and the problems of the source's sections."""
    values: dict[Any, Any] = {}
    problems = []
    for key, value in content.items():
        if key in _FIELDS or _section_of(key) or not isinstance(key, str) or not has_policy(key):
            given = {key: value}
        elif value is None or isinstance(value, dict):
            given = {f"{key}.{setting}": one for setting, one in (value or {}).items()}
        else:
            problems.append(f"{key}={value!r} ({source}): must be a section, settings of policy {key} below its name")
            continue
        problems += [f"{twice} ({source}): is given twice" for twice in given.keys() & values.keys()]
        values |= given
    return values, problems


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of ``HybridConfig`` for values by key: sections become mappings by the policy's name."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        if name := _section_of(key):
            sections.setdefault(name, {})[key.partition(".")[2]] = value
    return {**{key: values[key] for key in _FIELDS}, "sections": sections}


def load_with_sources(file: Path | None, overrides: Sequence[str]) -> tuple[HybridConfig, dict[str, str]]:
    """Return the configuration and, by key, the source of each value: "default", "file NAME" or "override".

    Raise ConfigError with all problems of all sources. Values that a later source replaced are not checked.
    """
    given: dict[Any, Any] = {}
    sources: dict[Any, str] = {}
    problems: list[str] = []

    readers: list[tuple[str, Callable[[], dict[Any, Any]]]] = []
    if file is not None:
        readers.append((f"file {file}", partial(read_file, file)))
    readers += [("override", partial(read_override, override)) for override in overrides]
    for source, read in readers:
        try:
            values, wrong = _by_key(read(), source)
        except ConfigError as error:
            problems += error.problems
            continue
        given |= values
        sources |= dict.fromkeys(values, source)
        problems += wrong
    failed = _load_policies(_policies_of(given))
    problems += failed.values()
    values = {key: default_of(field) for key, field in _known_fields().items()}
    values |= {key: value for key, value in given.items() if _section_of(key) not in failed}
    sources = {key: sources.get(key, "default") for key in values}
    if isinstance(values["profile"], str):
        values["profile"] = profile_path(values["profile"])
    problems += _problems(values, sources)
    if problems:
        raise ConfigError(*problems)
    return msgspec.convert(_nested(values), HybridConfig), sources


def _policies_of(given: Mapping[Any, Any]) -> list[str]:
    """Return the registered policies that ``given`` names, as ``policy`` or by the section of a key."""
    names = [given.get("policy"), *map(_section_of, given)]
    return [name for name in dict.fromkeys(one for one in names if isinstance(one, str)) if has_policy(name)]


def load_config(file: Path | None, overrides: Sequence[str]) -> HybridConfig:
    """Return the configuration of the defaults, then ``file``, then ``overrides`` of the form ``key=value``.

    Raise ConfigError if a source cannot be read or a value cannot work.
    """
    return load_with_sources(file, overrides)[0]


def config_from_environment() -> HybridConfig:
    """Return the configuration that the variables CONFIG and SET of ``sglang_hybrid.env`` ask for.

    Raise ConfigError as ``load_config`` does.
    """
    return load_config(env.CONFIG.get(), env.SET.get())


def describe(
    config: HybridConfig, sources: Mapping[str, str] | None = None, resolved: Mapping[str, str] | None = None
) -> str:
    """Return all settings with their descriptions as the text of a YAML file, which can be loaded again.

    A comment behind each value names its source, and the value that ``auto`` has on this host if ``resolved`` has one
    (see ``host_settings.resolved``).
    """
    values = config.by_key()
    fields = _known_fields()

    def paragraph(key: str, name: str) -> str:
        comment = textwrap.fill(description_of(fields[key]), width=110, initial_indent="# ", subsequent_indent="# ")
        setting = yaml.safe_dump({name: values[key]}, width=4096).strip()
        notes = [f"{values[key]} -> {resolved[key]}"] if resolved and key in resolved else []
        notes += [sources.get(key, "default")] if sources else []
        note = f"  # {'; '.join(notes)}" if notes else ""
        return f"{comment}\n{setting}{note}\n"

    paragraphs = [paragraph(key, key) for key in _FIELDS]
    for policy in policies_with_settings():
        assert policy.settings is not None
        section = [paragraph(f"{policy.name}.{name}", name) for name in fields_of(policy.settings)]
        body = textwrap.indent("\n".join(section), "  ")
        paragraphs.append(f"# Settings of policy {policy.name}: {policy.description}.\n{policy.name}:\n{body}")
    return "\n".join(paragraphs)
