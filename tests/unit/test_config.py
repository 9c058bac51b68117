"""Configuration: its sources and their order, values that are refused, and the messages of refusals."""

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeAlias

import msgspec
import pytest
import yaml

from sglang_hybrid import env, setting_fields
from sglang_hybrid.config import (
    ConfigError,
    HybridConfig,
    config_from_environment,
    describe,
    load_config,
    load_with_sources,
)
from sglang_hybrid.config_sources import parse_yaml
from sglang_hybrid.policies import registry
from sglang_hybrid.policies.hcattention.options import HCAttentionOptions
from sglang_hybrid.policies.hgca.options import HgcaOptions
from sglang_hybrid.policies.infinigen.options import InfinigenOptions
from sglang_hybrid.policies.scout.options import ScoutAttentionOptions, ScoutOptions

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_YAML = ROOT / "configs" / "default.yaml"
KEYS = [field.name for field in msgspec.structs.fields(HybridConfig) if field.name != "sections"]
SECTIONS: dict[str, type[msgspec.Struct]] = {
    "scout": ScoutOptions,
    "scoutattention": ScoutAttentionOptions,
    "hgca": HgcaOptions,
    "hcattention": HCAttentionOptions,
    "infinigen": InfinigenOptions,
}
SECTION_KEYS = [
    f"{name}.{field.name}" for name, section in SECTIONS.items() for field in msgspec.structs.fields(section)
]
GIB = 1024**3
Write: TypeAlias = Callable[[str], Path]  # settings as text -> the file that holds them


@pytest.fixture(autouse=True)
def no_inherited_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(text: str) -> Path:
        path = tmp_path / "settings.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


def problems_of(file: Path | None = None, overrides: list[str] | None = None) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides or [])
    assert str(caught.value).splitlines() == list(caught.value.problems), "one line per problem"
    return caught.value.problems


def problem_of(file: Path | None = None, overrides: list[str] | None = None) -> str:
    (problem,) = problems_of(file, overrides)
    return problem


# Sources


def test_without_any_source_the_defaults_apply() -> None:
    assert load_config(None, []) == HybridConfig()


def test_the_file_wins_over_defaults_and_overrides_win_over_the_file(write: Write) -> None:
    file = write("budget_tokens: 1024\nsink_blocks: 3\n")
    config, sources = load_with_sources(file, ["sink_blocks=0", "policy=full"])
    assert config == HybridConfig(budget_tokens=1024, sink_blocks=0, policy="full")
    assert sources["budget_tokens"] == f"file {file}"
    assert sources["sink_blocks"] == sources["policy"] == "override"
    assert sources["scout.recall_adapt"] == "default"
    assert list(sources) == [*KEYS, *SECTION_KEYS]


def test_the_last_of_two_overrides_of_one_key_wins() -> None:
    assert load_config(None, ["sink_blocks=3", "sink_blocks=4"]).sink_blocks == 4


def test_an_override_may_repair_a_bad_value_of_the_file(write: Write) -> None:
    assert load_config(write("sink_blocks: many\n"), ["sink_blocks=2"]).sink_blocks == 2


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n"])
def test_an_empty_file_changes_nothing(write: Write, text: str) -> None:
    assert load_config(write(text), []) == HybridConfig()


def test_an_override_may_have_spaces_and_quotes_and_further_equal_signs() -> None:
    assert load_config(None, [" sink_blocks = 2 "]).sink_blocks == 2
    assert load_config(None, ['host_memory="40GiB"']).host_memory == "40GiB"
    assert "'a=b'" in problem_of(overrides=["policy=a=b"])


# Unknown keys and unreadable sources


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("buget_tokens", "budget_tokens"),
        ("budget-tokens", "budget_tokens"),
        ("Policy", "policy"),
        ("sink", "sink_blocks"),
    ],
)
def test_an_unknown_key_is_refused_with_the_legal_keys_and_the_nearest_one(
    write: Write, key: str, nearest: str
) -> None:
    file = write(f"{key}: 1\n")
    for problem, source in [
        (problem_of(file), f"(file {file})"),
        (problem_of(overrides=[f"{key}=1"]), "(override)"),
    ]:
        assert repr(key) in problem
        assert source in problem
        assert f"did you mean {nearest}?" in problem
        assert f"legal keys: {', '.join(KEYS)}" in problem


def test_an_unknown_key_that_resembles_nothing_gets_no_suggestion() -> None:
    problem = problem_of(overrides=["zzz=1"])
    assert "did you mean" not in problem
    assert "legal keys: policy" in problem


@pytest.mark.parametrize("text", ["1: 2\n", "null: 2\n", "2020-01-01: 2\n", "1.5: 2\n"])
def test_a_file_key_that_is_not_text_is_an_unknown_key(write: Write, text: str) -> None:
    assert "unknown key" in problem_of(write(text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "nowhere.yaml"
    assert problem_of(file) == f"file {file}: does not exist"


def test_a_directory_in_place_of_the_file_is_named(tmp_path: Path) -> None:
    assert f"file {tmp_path}: cannot be read" in problem_of(tmp_path)


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "binary.yaml"
    file.write_bytes(b"policy: \xff\xfe\n")
    assert f"file {file}: cannot be read" in problem_of(file)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("policy: full\ndigest: [mean\nsink_blocks: 1\n", 3),
        ("policy: full\n\tdigest: mean\n", 2),
        ("policy: full\ndigest: !!python/object/apply:os.system ['true']\n", 2),
        ("policy: full\n---\npolicy: scout\n", 2),
        ("? [policy]\n: full\n", 1),
    ],
)
def test_bad_yaml_is_refused_with_file_and_line(write: Write, text: str, line: int) -> None:
    file = write(text)
    assert problem_of(file).startswith(f"file {file}, line {line}: not valid YAML: ")


@pytest.mark.parametrize("text", ["policy: 2024-13-45\n", "policy: \x07\n"])
def test_text_that_only_looks_like_yaml_is_refused_with_the_file(write: Write, text: str) -> None:
    file = write(text)
    assert problem_of(file).startswith(f"file {file}: not valid YAML: ")


def test_a_repeated_key_is_refused_with_its_line(write: Write) -> None:
    file = write("sink_blocks: 1\npolicy: full\nsink_blocks: 2\n")
    assert problem_of(file) == f"file {file}, line 3: not valid YAML: duplicate key 'sink_blocks'"


@pytest.mark.parametrize(("text", "kind"), [("- policy\n", "list"), ("full\n", "str")])
def test_a_file_without_keys_is_refused(write: Write, text: str, kind: str) -> None:
    file = write(text)
    assert problem_of(file) == f"file {file}: must hold lines of the form key: value, not a {kind}"


@pytest.mark.parametrize("override", ["policy", "", "=full", "policy:full", "  =1"])
def test_an_override_that_is_not_key_equals_value_is_refused(override: str) -> None:
    assert problem_of(overrides=[override]) == f"override {override!r}: must have the form key=value"


def test_an_override_with_bad_yaml_is_named() -> None:
    assert problem_of(overrides=["policy=[full"]).startswith("override 'policy=[full', line 1: not valid YAML: ")


# Values


@pytest.mark.parametrize(
    ("override", "given", "legal"),
    [
        ("policy=scuot", "policy='scuot'", "one of full, hcattention, hgca, infinigen, scout"),
        ("policy=", "policy=None", "one of full, hcattention, hgca, infinigen, scout"),
        ("policy=on", "policy=True", "one of full, hcattention, hgca, infinigen, scout"),
        ("policy=[full]", "policy=['full']", "one of full, hcattention, hgca, infinigen, scout"),
        ("whole_requests=all", "whole_requests='all'", "one of auto, never"),
        ("budget_tokens=abc", "budget_tokens='abc'", "a whole number > 0"),
        ("budget_tokens=10.5", "budget_tokens=10.5", "a whole number > 0"),
        ("budget_tokens=2048.0", "budget_tokens=2048.0", "a whole number > 0"),
        ("budget_tokens=true", "budget_tokens=True", "a whole number > 0"),
        ("budget_tokens='2048'", "budget_tokens='2048'", "a whole number > 0"),
        ("budget_tokens=0", "budget_tokens=0", "a whole number > 0"),
        ("budget_tokens=-32", "budget_tokens=-32", "a whole number > 0"),
        ("sink_blocks=-1", "sink_blocks=-1", "a whole number >= 0"),
        ("recent_blocks=-1", "recent_blocks=-1", "a whole number >= 0"),
        ("profile=5", "profile=5", '"default", "auto", "none"'),
        ("prediction=perfect", "prediction='perfect'", "one of auto, calibrated, none, raw"),
        ("scout.target_cpu_ratio=0", "scout.target_cpu_ratio=0", "a number > 0 and <= 1"),
        ("scout.target_cpu_ratio=1.5", "scout.target_cpu_ratio=1.5", "a number > 0 and <= 1"),
        ("scout.recall_adapt=maybe", "scout.recall_adapt='maybe'", "true or false"),
        ("host_memory=1024", "host_memory=1024", '"auto", a size such as "40GiB"'),
    ],
)
def test_a_bad_value_is_refused_with_key_value_source_and_what_is_legal(
    write: Write, override: str, given: str, legal: str
) -> None:
    key, _, text = override.partition("=")
    file = write(f"{key}: {text}\n")
    assert problem_of(overrides=[override]).startswith(f"{given} (override): must be {legal}")
    assert problem_of(file).startswith(f"{given} (file {file}): must be {legal}")


def test_a_budget_that_is_not_whole_blocks_is_refused_with_one_that_is() -> None:
    problem = problem_of(overrides=["budget_tokens=1000"])
    assert problem.startswith("budget_tokens=1000 (override): must be a multiple of 32")
    assert problem.endswith("such as 1024")


def test_a_budget_that_cannot_hold_sink_recent_and_tail_is_refused_with_the_least_that_can(write: Write) -> None:
    file = write("sink_blocks: 2\n")
    problem = problem_of(file, ["budget_tokens=128"])
    assert "budget_tokens=128 (override)" in problem
    assert f"sink_blocks=2 (file {file})" in problem
    assert "recent_blocks=2 (default)" in problem
    assert "at least 160" in problem
    assert load_config(file, ["budget_tokens=160"]).budget_tokens == 160


def test_a_budget_of_the_tail_alone_is_legal() -> None:
    assert load_config(None, ["budget_tokens=32", "sink_blocks=0", "recent_blocks=0"]).budget_tokens == 32


def test_all_problems_of_all_sources_are_reported_together(write: Write) -> None:
    file = write("polcy: full\nscout: {recall_adapt: all}\n")
    problems = problems_of(file, ["oops", "sink_blocks=-1", "host_memory=lots", "budget_tokens=100"])
    found = (
        "unknown key 'polcy'",
        "'oops'",
        "scout.recall_adapt='all'",
        "sink_blocks=-1",
        "host_memory='lots'",
        "budget_tokens=100",
    )
    assert len(problems) == len(found)
    for expected in found:
        assert sum(expected in problem for problem in problems) == 1


def test_problems_of_overrides_are_reported_next_to_a_file_that_cannot_be_parsed(write: Write) -> None:
    assert len(problems_of(write("policy: [\n"), ["scout.recall_adapt=all"])) == 2


# The object


def test_a_configuration_that_cannot_work_cannot_be_built() -> None:
    with pytest.raises(ConfigError, match=r"budget_tokens=100: must be a multiple of 32"):
        HybridConfig(budget_tokens=100)
    with pytest.raises(ConfigError, match="policy='none': must be one of full, hcattention, hgca, infinigen, scout"):
        HybridConfig(policy="none")
    with pytest.raises(ConfigError, match="host_memory"):
        msgspec.structs.replace(HybridConfig(), host_memory="0%")


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        HybridConfig().policy = "full"  # type: ignore[misc]


def test_a_configuration_survives_msgpack_and_is_checked_on_arrival() -> None:
    config = HybridConfig(policy="full", host_memory="1.5GB")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=HybridConfig) == config
    with pytest.raises(msgspec.ValidationError, match="multiple"):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"budget_tokens": 1000}), type=HybridConfig)
    with pytest.raises(msgspec.ValidationError, match="nope"):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"nope": 1}), type=HybridConfig)


def test_an_error_keeps_its_problems_when_it_crosses_processes() -> None:
    error = ConfigError("one", "two")
    assert pickle.loads(pickle.dumps(error)).problems == ("one", "two")  # noqa: S301


# Host memory


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auto", 70 * GIB),
        ("60%", 60 * GIB),
        ("100%", 100 * GIB),
        ("0.5%", GIB // 2),
        ("40GiB", 40 * GIB),
        ("40 gib", 40 * GIB),
        ("512MiB", 512 * 1024**2),
        ("64KiB", 64 * 1024),
        ("2TiB", 2 * 1024**4),
        ("1.5GB", 1_500_000_000),
        ("0.1GB", 100_000_000),
        ("3kB", 3000),
        ("3MB", 3_000_000),
        ("1TB", 10**12),
    ],
)
def test_host_memory_is_a_share_of_what_is_available_or_a_fixed_size(text: str, expected: int) -> None:
    assert load_config(None, [f"host_memory={text}"]).host_memory_bytes(available=100 * GIB) == expected


def test_a_share_of_host_memory_is_rounded_down_to_whole_bytes() -> None:
    assert HybridConfig(host_memory="33.3%").host_memory_bytes(available=1001) == 333


@pytest.mark.parametrize(
    "text",
    [
        "", "40", "40G", "GiB", "40GiB!", "-1GiB", "0GiB", "0%", "100.1%", "1e3MB", "1.GB", ".5GB", "40PiB", "Auto",
        "٤GiB", "40GiB\n", "9" * 5000 + "GB",
    ],
)  # fmt: skip
def test_host_memory_that_is_no_size_is_refused_with_what_is_legal(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        HybridConfig(host_memory=text)
    (problem,) = caught.value.problems
    assert problem.startswith(f"host_memory={text!r}: must be ")
    for legal in ['"auto"', '"40GiB"', '"60%"']:
        assert legal in problem


# Environment


def test_the_environment_gives_file_and_overrides(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    assert config_from_environment() == HybridConfig()
    monkeypatch.setenv("SGLANG_HYBRID_CONFIG", str(write("policy: full\nsink_blocks: 3\n")))
    monkeypatch.setenv("SGLANG_HYBRID_SET", json.dumps(["sink_blocks=2", "host_memory=60%"]))
    assert config_from_environment() == HybridConfig(policy="full", sink_blocks=2, host_memory="60%")


def test_environment_variables_are_read_at_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert env.ALLOW_UNTESTED_SGLANG.get() is False
    monkeypatch.setenv("SGLANG_HYBRID_ALLOW_UNTESTED_SGLANG", "1")
    assert env.ALLOW_UNTESTED_SGLANG.get() is True


@pytest.mark.parametrize("variable", env.VARIABLES, ids=lambda variable: variable.name)
def test_an_empty_variable_means_its_default(monkeypatch: pytest.MonkeyPatch, variable: env.EnvVar[Any]) -> None:
    monkeypatch.setenv(variable.name, "")
    assert variable.get() == variable.default


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", True),
        ("true", True),
        ("YES", True),
        (" on ", True),
        ("0", False),
        ("False", False),
        ("no", False),
        ("off", False),
    ],
)
def test_bools_have_several_spellings(monkeypatch: pytest.MonkeyPatch, text: str, expected: bool) -> None:
    monkeypatch.setenv("SGLANG_HYBRID_ALLOW_UNTESTED_SGLANG", text)
    assert env.ALLOW_UNTESTED_SGLANG.get() is expected


@pytest.mark.parametrize("text", ["2", "maybe", "t", " "])
def test_a_bad_bool_is_refused_with_the_variable_and_the_legal_values(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("SGLANG_HYBRID_ALLOW_UNTESTED_SGLANG", text)
    with pytest.raises(ConfigError) as caught:
        env.ALLOW_UNTESTED_SGLANG.get()
    assert f"SGLANG_HYBRID_ALLOW_UNTESTED_SGLANG={text!r}" in str(caught.value)
    assert "1, true, yes, on, 0, false, no, off" in str(caught.value)


@pytest.mark.parametrize("text", ["policy=full", '"policy=full"', '{"policy": "full"}', "[1]", "[", "null"])
def test_overrides_in_the_environment_must_be_a_json_list_of_strings(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("SGLANG_HYBRID_SET", text)
    with pytest.raises(ConfigError, match=r"SGLANG_HYBRID_SET=.*must be a JSON list of strings"):
        config_from_environment()


def test_every_variable_carries_the_package_prefix_and_a_one_line_description() -> None:
    for variable in env.VARIABLES:
        assert variable.name.startswith("SGLANG_HYBRID_")
        assert variable.doc
        assert "\n" not in variable.doc
    assert {value.name for value in vars(env).values() if isinstance(value, env.EnvVar)} == {
        variable.name for variable in env.VARIABLES
    }


# Documentation


def test_the_shipped_default_file_equals_the_defaults_and_names_every_key() -> None:
    assert load_config(DEFAULT_YAML, []) == HybridConfig()
    content = yaml.safe_load(DEFAULT_YAML.read_text(encoding="utf-8"))
    assert list(content) == [*KEYS, *SECTIONS]
    assert [f"{section}.{name}" for section in SECTIONS for name in content[section]] == SECTION_KEYS


def test_every_setting_has_a_description_and_legal_values_in_words() -> None:
    for settings in (HybridConfig, *SECTIONS.values()):
        for name, field in setting_fields.fields_of(settings).items():
            if name != "sections":
                assert setting_fields.description_of(field), name
                assert setting_fields.legal_values_of(field), name


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (bool, "true or false"),
        (float, "a number"),
        (Annotated[float, msgspec.Meta(gt=0, le=1)], "a number > 0 and <= 1"),
        (Annotated[int, msgspec.Meta(ge=1)] | None, "a whole number >= 1 or null"),
        (Annotated[Literal["auto"] | float, msgspec.Meta(description="x")], "a number or auto"),
        (Annotated[str, msgspec.Meta(extra={"legal": "a colour"})], "a colour"),
        (str, "text"),
    ],
)
def test_legal_values_of_types_that_settings_may_get_are_told_in_words(kind: object, words: str) -> None:
    assert set(setting_fields.legal_values(msgspec.inspect.type_info(kind)).split()) == set(words.split())


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "+1e-3", "0.001"])
def test_numbers_in_scientific_notation_are_numbers(text: str) -> None:
    assert parse_yaml(text, "override") == 0.001


def test_a_description_of_the_configuration_can_be_loaded_again_and_tells_sources(write: Write) -> None:
    config, sources = load_with_sources(None, ["policy=full", "host_memory=60%"])
    text = describe(config, sources)
    assert "policy: full  # override\n" in text
    assert "\nscout:\n" in text and "\n  recall_adapt: true  # default\n" in text
    assert load_config(write(text), []) == config


def test_importing_the_configuration_imports_neither_torch_nor_sglang() -> None:
    check = (
        "import sys, sglang_hybrid.config, sglang_hybrid.env; "
        "sys.exit(', '.join({'torch', 'sglang'} & sys.modules.keys()) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# The worker's settings


@pytest.mark.parametrize("value", ["auto", "start", "none", "/run/worker", "./worker-{rank}"])
def test_a_worker_is_started_left_out_or_named_by_its_directory(value: str) -> None:
    assert load_config(None, [f"worker={value}"]).worker == value


def test_a_misspelled_worker_is_refused_with_the_legal_values() -> None:
    assert '"auto", "start", "none"' in problem_of(overrides=["worker=statr"])


@pytest.mark.parametrize("setting", ["worker_threads=0", "worker_threads=2000"])
def test_thread_counts_out_of_range_are_refused(setting: str) -> None:
    assert "a whole number >= 1 and <= 1024 or auto" in problem_of(overrides=[setting])


# The settings of prediction and recall


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("scout.resident_bonus=0", "scout.resident_bonus", 0.0),
        ("scout.resident_bonus=1.5", "scout.resident_bonus", 1.5),
        ("scout.resident_bonus=auto", "scout.resident_bonus", "auto"),
        ("scout.min_miss_attention=0", "scout.min_miss_attention", 0.0),
        ("scout.min_miss_attention=0.002", "scout.min_miss_attention", 0.002),
        ("scout.min_miss_attention=auto", "scout.min_miss_attention", "auto"),
        ("scout.recall_interval=0", "scout.recall_interval", 0),
        ("scout.resident_tokens=0", "scout.resident_tokens", 0),
        ("scout.resident_tokens=1024", "scout.resident_tokens", 1024),
        ("scout.recall_interval=300", "scout.recall_interval", 300),
        ("scout.recall_interval=auto", "scout.recall_interval", "auto"),
        ("scout.target_cpu_ratio=1", "scout.target_cpu_ratio", 1.0),
        ("scout.recall_adapt=off", "scout.recall_adapt", False),
        ("prediction=none", "prediction", "none"),
        ("profile=configs/profiles/a.safetensors", "profile", "configs/profiles/a.safetensors"),
    ],
)
def test_prediction_and_recall_are_set_by_number_or_left_to_the_profile(override: str, key: str, value: object) -> None:
    assert load_config(None, [override]).by_key()[key] == value


@pytest.mark.parametrize(
    ("override", "given"),
    [
        ("scout.resident_bonus=-0.5", "scout.resident_bonus=-0.5"),
        ("scout.resident_bonus=.inf", "scout.resident_bonus=inf"),
        ("scout.resident_bonus=.nan", "scout.resident_bonus=nan"),
        ("scout.recall_interval=-1", "scout.recall_interval=-1"),
        ("scout.resident_tokens=-32", "scout.resident_tokens=-32"),
    ],
)
def test_a_bonus_an_interval_or_a_size_that_is_no_number_from_zero_on_is_refused(override: str, given: str) -> None:
    assert problem_of(overrides=[override]).startswith(f"{given} (override): must be a ")
    assert " >= 0 " in problem_of(overrides=[override])


@pytest.mark.parametrize(
    ("override", "given"),
    [
        ("scout.min_miss_attention=-0.1", "-0.1"),
        ("scout.min_miss_attention=1.5", "1.5"),
        ("scout.min_miss_attention=.nan", "nan"),
    ],
)
def test_a_share_that_is_no_part_of_one_is_refused(override: str, given: str) -> None:
    problem = problem_of(overrides=[override])
    assert f"scout.min_miss_attention={given} (override)" in problem
    assert problem.endswith(": must be a number >= 0 and <= 1 or auto")


@pytest.mark.parametrize(
    "override", ["scout.resident_bonus=much", "scout.resident_bonus=true", "scout.resident_bonus="]
)
def test_a_bonus_of_another_type_is_refused_with_what_is_legal(override: str) -> None:
    assert set(problem_of(overrides=[override]).split("must be ")[1].split()) >= {"a", "number", "or", "auto"}


@pytest.mark.parametrize(
    "override", ["scout.recall_interval=2.5", "scout.recall_interval=often", "scout.recall_interval=false"]
)
def test_an_interval_of_another_type_is_refused_with_what_is_legal(override: str) -> None:
    assert set(problem_of(overrides=[override]).split("must be ")[1].split()) >= {"a", "whole", "number", "or", "auto"}


def test_a_calibrated_prediction_needs_a_profile() -> None:
    problem = problem_of(overrides=["profile=none", "prediction=calibrated"])
    assert problem.startswith("prediction='calibrated' (override), profile='none' (override): ")
    assert "profile=auto fits a predictor at the start" in problem
    config = load_config(None, ["prediction=calibrated", "profile=some.safetensors"])
    assert (config.prediction, config.profile) == ("calibrated", "some.safetensors")


@pytest.mark.parametrize("prediction", ["auto", "raw", "none"])
def test_every_other_prediction_does_with_and_without_a_profile(prediction: str) -> None:
    for profile in ("none", "some.safetensors"):
        assert load_config(None, [f"prediction={prediction}", f"profile={profile}"]).prediction == prediction


@pytest.mark.parametrize(
    ("override", "advice"),
    [
        ("block_tokens=64", "blocks have 32 tokens"),
        ("worker_group_threads=2", "drop it"),
        ("worker_spin_us=0", "drop it"),
        ("worker_task_blocks=1", "drop it"),
        ("digest=mean", "drop it"),
        ("digest_spread=1", "drop it"),
        ("most_budget_tokens=8192", "raise budget_tokens instead"),
        ("sketch_bits=3", "set sketch_channels to take less memory"),
        ("attend=selected", "policy=scoutattention"),
        ("scout.selection=layer", "policy=scoutattention"),
        ("scout.score_interval=1", "all blocks are scored at every step"),
        ("score_interval=4", "all blocks are scored at every step"),
        ("scout.hot_tokens=0", "all blocks are scored at every step"),
        ("hot_tokens=4096", "all blocks are scored at every step"),
    ],
)
def test_a_setting_of_an_earlier_version_is_refused_with_what_to_do_instead(override: str, advice: str) -> None:
    problem = problem_of(overrides=[override])
    assert problem.startswith(f"{override.partition('=')[0]} (override): was removed; ") and advice in problem


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("dense=never", "whole_requests"),
        ("recall_interval=3", "scout.recall_interval"),
        ("sticky_bonus=0", "scout.resident_bonus"),
        ("scout.sticky_bonus=0", "scout.resident_bonus"),
        ("miss_share=0", "scout.min_miss_attention"),
        ("recall_beta=0.2", "scout.target_cpu_ratio"),
    ],
)
def test_a_setting_that_has_another_name_is_refused_with_the_new_one(old: str, new: str) -> None:
    assert problem_of(overrides=[old]) == f"{old.partition('=')[0]} (override): is called {new} now"


def test_tasks_of_the_worker_have_as_many_blocks_as_its_plan_says_unless_a_test_asks_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang_hybrid.protocol.messages import ThreadPlan

    assert env.WORKER_TASK_BLOCKS.get() == ThreadPlan().task_blocks
    for text in ("0", "4097", "many"):
        monkeypatch.setenv(env.WORKER_TASK_BLOCKS.name, text)
        with pytest.raises(ConfigError, match="a whole number from 1 to 4096"):
            env.WORKER_TASK_BLOCKS.get()


# Sections of policies


def test_there_are_at_most_eighteen_settings_at_the_top_level() -> None:
    assert len(KEYS) <= 18


def test_a_section_is_a_mapping_in_a_file_and_has_dotted_keys_on_the_command_line(write: Write) -> None:
    file = write("policy: scout\nscout:\n  recall_interval: 3\n  recall_adapt: false\n")
    config, sources = load_with_sources(file, ["scout.recall_interval=5"])
    assert config.scout == config.section(ScoutOptions) == ScoutOptions(recall_interval=5, recall_adapt=False)
    assert sources["scout.recall_interval"] == "override"
    assert sources["scout.recall_adapt"] == f"file {file}"
    assert sources["scout.cpu_share"] == "default"


@pytest.mark.parametrize("text", ["scout:\n", "scout: {}\n", "scout: {recall_adapt: true}\n"])
def test_a_section_without_other_values_than_the_defaults_changes_nothing(write: Write, text: str) -> None:
    assert load_config(write(text), []) == HybridConfig()


def test_the_section_of_a_policy_that_is_not_chosen_is_accepted_and_checked() -> None:
    assert load_config(None, ["policy=full", "scout.recall_interval=3"]).scout.recall_interval == 3
    assert problem_of(overrides=["policy=full", "scout.recall_adapt=all"]).startswith(
        "scout.recall_adapt='all' (override): must be "
    )


def test_a_section_is_built_changed_and_checked_in_python_too() -> None:
    config = HybridConfig(sections={"scout": ScoutOptions(recall_interval=3)})
    assert config == HybridConfig(sections={"scout": {"recall_interval": 3}})
    assert config.with_section(ScoutOptions(recall_adapt=False)).scout == ScoutOptions(recall_adapt=False)
    assert config.by_key()["scout.recall_interval"] == 3
    with pytest.raises(ConfigError, match=r"scout.cpu_share=2: must be a number >= 0 and <= 1"):
        HybridConfig(sections={"scout": ScoutOptions(cpu_share=2)})
    with pytest.raises(ConfigError, match=r"unknown key 'scout.nope'"):
        HybridConfig(sections={"scout": {"nope": 1}})
    with pytest.raises(ConfigError, match="no policy nope: there are full, hcattention, hgca, infinigen, scout"):
        HybridConfig(sections={"nope": {}})


def test_sections_survive_msgpack() -> None:
    config = HybridConfig(sections={"scout": ScoutOptions(recall_interval=3)})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=HybridConfig) == config


def test_an_unknown_key_of_a_section_is_refused_with_the_keys_of_that_section(write: Write) -> None:
    file = write("scout:\n  recal_interval: 3\n")
    keys = [key for key in SECTION_KEYS if key.startswith("scout.")]
    for problem in (problem_of(file), problem_of(overrides=["scout.recal_interval=3"])):
        assert problem.startswith("unknown key 'scout.recal_interval' (")
        assert problem.endswith(f", did you mean scout.recall_interval? legal keys: {', '.join(keys)}")


@pytest.mark.parametrize("key", ["recal_interval", "scot.recall_interval"])
def test_a_key_without_its_section_or_with_a_misspelled_one_gets_the_dotted_name(key: str) -> None:
    problem = problem_of(overrides=[f"{key}=3"])
    assert ", did you mean scout.recall_interval? legal keys: policy, " in problem
    assert problem.endswith("; sections: scout, scoutattention, hgca, hcattention, infinigen")


def test_a_policy_without_settings_has_no_section() -> None:
    assert problem_of(overrides=["full.speed=3"]) == "full.speed (override): policy full has no settings"


@pytest.mark.parametrize("value", ["3", "[1]", "fast"])
def test_a_section_that_is_no_mapping_is_refused(value: str) -> None:
    assert "must be a section, settings of policy scout below its name" in problem_of(overrides=[f"scout={value}"])


def test_a_setting_that_one_file_gives_in_both_ways_is_refused(write: Write) -> None:
    file = write("scout: {recall_interval: 3}\nscout.recall_interval: 4\n")
    assert problem_of(file) == f"scout.recall_interval (file {file}): is given twice"


def test_sections_reach_other_processes_through_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_HYBRID_SET", json.dumps(["scout.recall_interval=3"]))
    assert config_from_environment() == HybridConfig(sections={"scout": ScoutOptions(recall_interval=3)})


# Policies of other packages

WINDOW = """
from typing import Annotated
import msgspec
from msgspec import Meta
from sglang_hybrid.policies.registry import register_policy

class WindowOptions(msgspec.Struct, frozen=True, kw_only=True):
    first: Annotated[int, Meta(ge=0, description="First blocks of a request.")] = 1
    last: Annotated[int, Meta(ge=1, description="Last blocks of a request.")] = 16

    def __post_init__(self):
        if self.first > self.last:
            raise ValueError("first must not be larger than last")

@register_policy("window", description="the first and the last blocks", settings=WindowOptions)
def create(context):
    raise NotImplementedError
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Return a function that installs a package with the policy ``window``, whose module has the given source."""

    def install(source: str) -> str:
        name = f"window_of_{tmp_path.name}".replace("-", "_")
        (tmp_path / f"{name}.py").write_text(source)
        metadata = tmp_path / f"{name}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[{registry.ENTRY_POINTS}]\nwindow = {name}\n")
        monkeypatch.setattr(registry, "_policies", dict(registry._policies))
        monkeypatch.syspath_prepend(tmp_path)
        return name

    return install


def test_a_policy_of_another_package_gets_its_section_like_ours(package: Callable[[str], str], write: Write) -> None:
    name = package(WINDOW)
    config, sources = load_with_sources(write("window: {last: 8}\n"), ["window.first=2"])
    options = sys.modules[name].WindowOptions
    assert config.policy == "scout" and config.section(options) == options(first=2, last=8)
    assert sources["window.first"] == "override"
    assert "\nwindow:\n  # First blocks of a request.\n  first: 2\n" in describe(config)
    assert load_config(write(describe(config)), []) == config
    assert load_config(None, ["policy=window"]).by_key()["window.last"] == 16


def test_the_package_of_a_policy_is_imported_only_when_it_is_chosen_or_its_section_is_given(
    package: Callable[[str], str],
) -> None:
    name = package(WINDOW)
    assert "\nwindow:" not in describe(load_config(None, ["scout.recall_adapt=off"]))
    assert name not in sys.modules
    assert "window.last" in load_with_sources(None, ["policy=window"])[1]
    assert name in sys.modules


def test_settings_of_another_package_are_refused_as_ours_are(package: Callable[[str], str]) -> None:
    package(WINDOW)
    assert problem_of(overrides=["window.last=0"]) == "window.last=0 (override): must be a whole number >= 1"
    assert ", did you mean window.last? legal keys: window.first, window.last" in problem_of(overrides=["window.lst=1"])
    assert problem_of(overrides=["window.first=20"]) == "section window: first must not be larger than last"


def test_a_package_that_cannot_be_imported_is_refused_with_the_reason(package: Callable[[str], str]) -> None:
    package("import no_such_module")
    expected = "policy window cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'"
    assert problem_of(overrides=["window.last=3"]) == expected
    assert problem_of(overrides=["policy=window"]) == expected


class Required(msgspec.Struct, frozen=True):
    size: int


class Mutable(msgspec.Struct):
    size: int = 1


class Fine(msgspec.Struct, frozen=True):
    size: int = 1


def create_nothing(context: object) -> NoReturn:
    raise AssertionError("a policy that is refused is not created")


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("window", Required, "must have defaults: size"),
        ("window", Mutable, "must be frozen"),
        ("window", ScoutOptions, "has the settings of another policy"),
        ("worker", Fine, "needs a name that no setting has"),
        ("a.b", Fine, "needs a name that no setting has"),
    ],
)
def test_settings_that_cannot_be_a_section_are_refused_when_they_are_registered(
    name: str, settings: type[msgspec.Struct], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.policy_names()
    monkeypatch.setattr(registry, "_policies", dict(registry._policies))
    with pytest.raises(ValueError, match=reason):
        registry.register_policy(name, description="x", settings=settings)(create_nothing)
