"""Configuration: sources and their order, what is refused, and what the refusal says."""

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest
import yaml

from sglang_hybrid import config as config_module
from sglang_hybrid import env
from sglang_hybrid.config import (
    ConfigError,
    HybridConfig,
    config_from_environment,
    describe,
    load_config,
    load_with_sources,
)

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_YAML = ROOT / "configs" / "default.yaml"
KEYS = [field.name for field in msgspec.structs.fields(HybridConfig)]
GIB = 1024**3


@pytest.fixture(autouse=True)
def no_inherited_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)


@pytest.fixture
def write(tmp_path: Path):
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


def test_without_any_source_the_defaults_apply():
    assert load_config(None, []) == HybridConfig()


def test_defaults_are_the_documented_ones():
    assert msgspec.structs.asdict(HybridConfig()) == {
        "policy": "scout",
        "budget_tokens": 2048,
        "resident_tokens": "auto",
        "sink_blocks": 1,
        "recent_blocks": 2,
        "digest_dtype": "auto",
        "profile": "none",
        "prediction": "auto",
        "selection": "head",
        "attend": "resident",
        "sticky_bonus": "auto",
        "miss_share": "auto",
        "lse_shift": True,
        "whole_requests": "auto",
        "cpu_share": "auto",
        "score_interval": "auto",
        "hot_tokens": "auto",
        "recall_interval": "auto",
        "recall_beta": 0.12,
        "recall_adapt": True,
        "sketch_channels": 32,
        "host_memory": "auto",
        "worker": "auto",
        "worker_provider": "native",
        "worker_threads": "auto",
        "worker_cores": "auto",
        "worker_deadline_ms": 500,
        "worker_restart_seconds": 5.0,
    }


def test_the_file_wins_over_defaults_and_overrides_win_over_the_file(write):
    file = write("budget_tokens: 1024\nsink_blocks: 3\n")
    config, sources = load_with_sources(file, ["sink_blocks=0", "policy=full"])
    assert config == HybridConfig(budget_tokens=1024, sink_blocks=0, policy="full")
    assert sources["budget_tokens"] == f"file {file}"
    assert sources["sink_blocks"] == sources["policy"] == "override"
    assert sources["attend"] == "default"
    assert list(sources) == KEYS


def test_the_last_of_two_overrides_of_one_key_wins():
    assert load_config(None, ["sink_blocks=3", "sink_blocks=4"]).sink_blocks == 4


def test_an_override_may_repair_a_bad_value_of_the_file(write):
    assert load_config(write("sink_blocks: many\n"), ["sink_blocks=2"]).sink_blocks == 2


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n"])
def test_an_empty_file_changes_nothing(write, text):
    assert load_config(write(text), []) == HybridConfig()


def test_an_override_may_have_spaces_and_quotes_and_further_equal_signs():
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
def test_an_unknown_key_is_refused_with_the_legal_keys_and_the_nearest_one(write, key, nearest):
    file = write(f"{key}: 1\n")
    for problem, source in [
        (problem_of(file), f"(file {file})"),
        (problem_of(overrides=[f"{key}=1"]), "(override)"),
    ]:
        assert repr(key) in problem
        assert source in problem
        assert f"did you mean {nearest}?" in problem
        assert f"legal keys: {', '.join(KEYS)}" in problem


def test_an_unknown_key_that_resembles_nothing_gets_no_suggestion():
    problem = problem_of(overrides=["zzz=1"])
    assert "did you mean" not in problem
    assert "legal keys: policy" in problem


@pytest.mark.parametrize("text", ["1: 2\n", "null: 2\n", "2020-01-01: 2\n", "1.5: 2\n"])
def test_a_file_key_that_is_not_text_is_an_unknown_key(write, text):
    assert "unknown key" in problem_of(write(text))


def test_a_missing_file_is_named(tmp_path):
    file = tmp_path / "nowhere.yaml"
    assert problem_of(file) == f"file {file}: does not exist"


def test_a_directory_in_place_of_the_file_is_named(tmp_path):
    assert f"file {tmp_path}: cannot be read" in problem_of(tmp_path)


def test_a_file_that_is_not_text_is_named(tmp_path):
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
def test_bad_yaml_is_refused_with_file_and_line(write, text, line):
    file = write(text)
    assert problem_of(file).startswith(f"file {file}, line {line}: not valid YAML: ")


@pytest.mark.parametrize("text", ["policy: 2024-13-45\n", "policy: \x07\n"])
def test_text_that_only_looks_like_yaml_is_refused_with_the_file(write, text):
    file = write(text)
    assert problem_of(file).startswith(f"file {file}: not valid YAML: ")


def test_a_repeated_key_is_refused_with_its_line(write):
    file = write("sink_blocks: 1\npolicy: full\nsink_blocks: 2\n")
    assert problem_of(file) == f"file {file}, line 3: not valid YAML: duplicate key 'sink_blocks'"


@pytest.mark.parametrize(("text", "kind"), [("- policy\n", "list"), ("full\n", "str")])
def test_a_file_without_keys_is_refused(write, text, kind):
    file = write(text)
    assert problem_of(file) == f"file {file}: must hold lines of the form key: value, not a {kind}"


@pytest.mark.parametrize("override", ["policy", "", "=full", "policy:full", "  =1"])
def test_an_override_that_is_not_key_equals_value_is_refused(override):
    assert problem_of(overrides=[override]) == f"override {override!r}: must have the form key=value"


def test_an_override_with_bad_yaml_is_named():
    assert problem_of(overrides=["policy=[full"]).startswith("override 'policy=[full', line 1: not valid YAML: ")


# Values


@pytest.mark.parametrize(
    ("override", "given", "legal"),
    [
        ("policy=scuot", "policy='scuot'", "one of full, scout"),
        ("policy=", "policy=None", "one of full, scout"),
        ("policy=on", "policy=True", "one of full, scout"),
        ("policy=[full]", "policy=['full']", "one of full, scout"),
        ("attend=all", "attend='all'", "one of resident, selected"),
        ("budget_tokens=abc", "budget_tokens='abc'", "a whole number > 0"),
        ("budget_tokens=10.5", "budget_tokens=10.5", "a whole number > 0"),
        ("budget_tokens=2048.0", "budget_tokens=2048.0", "a whole number > 0"),
        ("budget_tokens=true", "budget_tokens=True", "a whole number > 0"),
        ("budget_tokens='2048'", "budget_tokens='2048'", "a whole number > 0"),
        ("budget_tokens=0", "budget_tokens=0", "a whole number > 0"),
        ("budget_tokens=-32", "budget_tokens=-32", "a whole number > 0"),
        ("sink_blocks=-1", "sink_blocks=-1", "a whole number >= 0"),
        ("recent_blocks=-1", "recent_blocks=-1", "a whole number >= 0"),
        ("profile=5", "profile=5", "text"),
        ("prediction=perfect", "prediction='perfect'", "one of auto, calibrated, none, raw"),
        ("selection=row", "selection='row'", "one of head, layer"),
        ("attend=all", "attend='all'", "one of resident, selected"),
        ("recall_beta=0", "recall_beta=0", "a number > 0 and <= 1"),
        ("recall_beta=1.5", "recall_beta=1.5", "a number > 0 and <= 1"),
        ("recall_adapt=maybe", "recall_adapt='maybe'", "true or false"),
        ("host_memory=1024", "host_memory=1024", '"auto", a size such as "40GiB"'),
    ],
)
def test_a_bad_value_is_refused_with_key_value_source_and_what_is_legal(write, override, given, legal):
    key, _, text = override.partition("=")
    file = write(f"{key}: {text}\n")
    assert problem_of(overrides=[override]).startswith(f"{given} (override): must be {legal}")
    assert problem_of(file).startswith(f"{given} (file {file}): must be {legal}")


def test_a_budget_that_is_not_whole_blocks_is_refused_with_one_that_is():
    problem = problem_of(overrides=["budget_tokens=1000"])
    assert problem.startswith("budget_tokens=1000 (override): must be a multiple of 32")
    assert problem.endswith("such as 1024")


def test_a_budget_that_cannot_hold_sink_recent_and_tail_is_refused_with_the_least_that_can(write):
    file = write("sink_blocks: 2\n")
    problem = problem_of(file, ["budget_tokens=128"])
    assert "budget_tokens=128 (override)" in problem
    assert f"sink_blocks=2 (file {file})" in problem
    assert "recent_blocks=2 (default)" in problem
    assert "at least 160" in problem
    assert load_config(file, ["budget_tokens=160"]).budget_tokens == 160


def test_a_budget_of_the_tail_alone_is_legal():
    assert load_config(None, ["budget_tokens=32", "sink_blocks=0", "recent_blocks=0"]).budget_tokens == 32


def test_all_problems_of_all_sources_are_reported_together(write):
    file = write("polcy: full\nattend: all\n")
    problems = problems_of(file, ["oops", "sink_blocks=-1", "host_memory=lots", "budget_tokens=100"])
    found = "unknown key 'polcy'", "'oops'", "attend='all'", "sink_blocks=-1", "host_memory='lots'", "budget_tokens=100"
    assert len(problems) == len(found)
    for expected in found:
        assert sum(expected in problem for problem in problems) == 1


def test_problems_of_overrides_are_reported_next_to_a_file_that_cannot_be_parsed(write):
    assert len(problems_of(write("policy: [\n"), ["attend=all"])) == 2


# The object


def test_a_configuration_that_cannot_work_cannot_be_built():
    with pytest.raises(ConfigError, match=r"budget_tokens=100: must be a multiple of 32"):
        HybridConfig(budget_tokens=100)
    with pytest.raises(ConfigError, match="policy='none': must be one of full, scout"):
        HybridConfig(policy="none")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="host_memory"):
        msgspec.structs.replace(HybridConfig(), host_memory="0%")


def test_a_configuration_cannot_be_changed():
    with pytest.raises(AttributeError):
        HybridConfig().policy = "full"  # type: ignore[misc]


def test_a_configuration_survives_msgpack_and_is_checked_on_arrival():
    config = HybridConfig(policy="full", host_memory="1.5GB")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=HybridConfig) == config
    with pytest.raises(msgspec.ValidationError, match="multiple"):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"budget_tokens": 1000}), type=HybridConfig)
    with pytest.raises(msgspec.ValidationError, match="nope"):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"nope": 1}), type=HybridConfig)


def test_an_error_keeps_its_problems_when_it_crosses_processes():
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
def test_host_memory_is_a_share_of_what_is_available_or_a_fixed_size(text, expected):
    assert load_config(None, [f"host_memory={text}"]).host_memory_bytes(available=100 * GIB) == expected


def test_a_share_of_host_memory_is_rounded_down_to_whole_bytes():
    assert HybridConfig(host_memory="33.3%").host_memory_bytes(available=1001) == 333


@pytest.mark.parametrize(
    "text",
    [
        "", "40", "40G", "GiB", "40GiB!", "-1GiB", "0GiB", "0%", "100.1%", "1e3MB", "1.GB", ".5GB", "40PiB", "Auto",
        "٤GiB", "40GiB\n", "9" * 5000 + "GB",
    ],
)  # fmt: skip
def test_host_memory_that_is_no_size_is_refused_with_what_is_legal(text):
    with pytest.raises(ConfigError) as caught:
        HybridConfig(host_memory=text)
    (problem,) = caught.value.problems
    assert problem.startswith(f"host_memory={text!r}: must be ")
    for legal in ['"auto"', '"40GiB"', '"60%"']:
        assert legal in problem


# Environment


def test_the_environment_gives_file_and_overrides(write, monkeypatch):
    assert config_from_environment() == HybridConfig()
    monkeypatch.setenv("SGLANG_HYBRID_CONFIG", str(write("policy: full\nsink_blocks: 3\n")))
    monkeypatch.setenv("SGLANG_HYBRID_SET", json.dumps(["sink_blocks=2", "host_memory=60%"]))
    assert config_from_environment() == HybridConfig(policy="full", sink_blocks=2, host_memory="60%")


def test_environment_variables_are_read_at_use(monkeypatch):
    assert env.ALLOW_UNTESTED_SGLANG.get() is False
    monkeypatch.setenv("SGLANG_HYBRID_ALLOW_UNTESTED_SGLANG", "1")
    assert env.ALLOW_UNTESTED_SGLANG.get() is True


@pytest.mark.parametrize("variable", env.VARIABLES, ids=lambda variable: variable.name)
def test_an_empty_variable_means_its_default(monkeypatch, variable):
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
def test_bools_have_several_spellings(monkeypatch, text, expected):
    monkeypatch.setenv("SGLANG_HYBRID_ALLOW_UNTESTED_SGLANG", text)
    assert env.ALLOW_UNTESTED_SGLANG.get() is expected


@pytest.mark.parametrize("text", ["2", "maybe", "t", " "])
def test_a_bad_bool_is_refused_with_the_variable_and_the_legal_values(monkeypatch, text):
    monkeypatch.setenv("SGLANG_HYBRID_ALLOW_UNTESTED_SGLANG", text)
    with pytest.raises(ConfigError) as caught:
        env.ALLOW_UNTESTED_SGLANG.get()
    assert f"SGLANG_HYBRID_ALLOW_UNTESTED_SGLANG={text!r}" in str(caught.value)
    assert "1, true, yes, on, 0, false, no, off" in str(caught.value)


@pytest.mark.parametrize("text", ["policy=full", '"policy=full"', '{"policy": "full"}', "[1]", "[", "null"])
def test_overrides_in_the_environment_must_be_a_json_list_of_strings(monkeypatch, text):
    monkeypatch.setenv("SGLANG_HYBRID_SET", text)
    with pytest.raises(ConfigError, match=r"SGLANG_HYBRID_SET=.*must be a JSON list of strings"):
        config_from_environment()


def test_every_variable_carries_the_package_prefix_and_a_one_line_description():
    for variable in env.VARIABLES:
        assert variable.name.startswith("SGLANG_HYBRID_")
        assert variable.doc
        assert "\n" not in variable.doc
    assert {value.name for value in vars(env).values() if isinstance(value, env.EnvVar)} == {
        variable.name for variable in env.VARIABLES
    }


# Documentation


def test_the_shipped_default_file_equals_the_defaults_and_names_every_key():
    assert load_config(DEFAULT_YAML, []) == HybridConfig()
    assert list(yaml.safe_load(DEFAULT_YAML.read_text(encoding="utf-8"))) == KEYS


def test_the_shipped_default_file_carries_the_description_of_every_setting():
    assert DEFAULT_YAML.read_text(encoding="utf-8").endswith("\n\n" + describe(HybridConfig()))


def test_every_setting_has_a_description_and_legal_values_in_words():
    for field in msgspec.structs.fields(HybridConfig):
        kind = msgspec.inspect.type_info(field.type)
        assert isinstance(kind, msgspec.inspect.Metadata), field.name
        assert kind.extra_json_schema["description"], field.name
        assert config_module._legal(kind)


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
def test_legal_values_of_types_that_settings_may_get_are_told_in_words(kind, words):
    assert set(config_module._legal(msgspec.inspect.type_info(kind)).split()) == set(words.split())


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "+1e-3", "0.001"])
def test_numbers_in_scientific_notation_are_numbers(text):
    assert config_module._parse_yaml(text, "override") == 0.001


def test_a_description_of_the_configuration_can_be_loaded_again_and_tells_sources(write):
    config, sources = load_with_sources(None, ["policy=full", "host_memory=60%"])
    text = describe(config, sources)
    assert "policy: full  # override\n" in text
    assert "attend: resident  # default\n" in text
    assert load_config(write(text), []) == config


def test_importing_the_configuration_imports_neither_torch_nor_sglang():
    check = (
        "import sys, sglang_hybrid.config, sglang_hybrid.env; "
        "sys.exit(', '.join({'torch', 'sglang'} & sys.modules.keys()) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# The worker's settings


@pytest.mark.parametrize("value", ["auto", "start", "none", "/run/worker", "./worker-{rank}"])
def test_a_worker_is_started_left_out_or_named_by_its_directory(value: str):
    assert load_config(None, [f"worker={value}"]).worker == value


def test_a_misspelled_worker_is_refused_with_the_legal_values():
    assert '"auto", "start", "none"' in problem_of(overrides=["worker=statr"])


@pytest.mark.parametrize("setting", ["worker_threads=0", "worker_threads=2000"])
def test_thread_counts_out_of_range_are_refused(setting: str):
    assert "from 1 to 1024" in problem_of(overrides=[setting])


# The settings of prediction and recall


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("sticky_bonus=0", "sticky_bonus", 0.0),
        ("sticky_bonus=1.5", "sticky_bonus", 1.5),
        ("sticky_bonus=auto", "sticky_bonus", "auto"),
        ("miss_share=0", "miss_share", 0.0),
        ("miss_share=0.002", "miss_share", 0.002),
        ("miss_share=auto", "miss_share", "auto"),
        ("recall_interval=0", "recall_interval", 0),
        ("resident_tokens=0", "resident_tokens", 0),
        ("resident_tokens=1024", "resident_tokens", 1024),
        ("recall_interval=300", "recall_interval", 300),
        ("recall_interval=auto", "recall_interval", "auto"),
        ("recall_beta=1", "recall_beta", 1.0),
        ("recall_adapt=off", "recall_adapt", False),
        ("prediction=none", "prediction", "none"),
        ("selection=layer", "selection", "layer"),
        ("attend=selected", "attend", "selected"),
        ("profile=configs/profiles/a.safetensors", "profile", "configs/profiles/a.safetensors"),
    ],
)
def test_prediction_and_recall_are_set_by_number_or_left_to_the_profile(override: str, key: str, value: object):
    assert getattr(load_config(None, [override]), key) == value


@pytest.mark.parametrize(
    ("override", "given"),
    [
        ("sticky_bonus=-0.5", "sticky_bonus=-0.5"),
        ("sticky_bonus=.inf", "sticky_bonus=inf"),
        ("sticky_bonus=.nan", "sticky_bonus=nan"),
        ("recall_interval=-1", "recall_interval=-1"),
        ("resident_tokens=-32", "resident_tokens=-32"),
        ("hot_tokens=-32", "hot_tokens=-32"),
    ],
)
def test_a_bonus_an_interval_or_a_size_that_is_no_number_from_zero_on_is_refused(override: str, given: str):
    problem = problem_of(overrides=[override])
    assert f"{given} (override)" in problem
    assert problem.endswith(': must each be "auto" or a number from 0 on')


@pytest.mark.parametrize(
    ("override", "given"), [("miss_share=-0.1", "-0.1"), ("miss_share=1.5", "1.5"), ("miss_share=.nan", "nan")]
)
def test_a_share_that_is_no_part_of_one_is_refused(override: str, given: str):
    problem = problem_of(overrides=[override])
    assert f"miss_share={given} (override)" in problem
    assert problem.endswith(': must be "auto" or a number from 0 to 1')


@pytest.mark.parametrize("override", ["sticky_bonus=much", "sticky_bonus=true", "sticky_bonus="])
def test_a_bonus_of_another_type_is_refused_with_what_is_legal(override: str):
    assert set(problem_of(overrides=[override]).split("must be ")[1].split()) == {"a", "number", "or", "auto"}


@pytest.mark.parametrize("override", ["recall_interval=2.5", "recall_interval=often", "recall_interval=false"])
def test_an_interval_of_another_type_is_refused_with_what_is_legal(override: str):
    assert set(problem_of(overrides=[override]).split("must be ")[1].split()) == {"a", "whole", "number", "or", "auto"}


def test_a_calibrated_prediction_needs_a_profile():
    problem = problem_of(overrides=["prediction=calibrated"])
    assert problem.startswith("prediction='calibrated' (override), profile='none' (default): ")
    assert "sglang-hybrid profile makes one" in problem
    config = load_config(None, ["prediction=calibrated", "profile=some.safetensors"])
    assert (config.prediction, config.profile) == ("calibrated", "some.safetensors")


@pytest.mark.parametrize("prediction", ["auto", "raw", "none"])
def test_every_other_prediction_does_with_and_without_a_profile(prediction: str):
    for profile in ("none", "some.safetensors"):
        assert load_config(None, [f"prediction={prediction}", f"profile={profile}"]).prediction == prediction


@pytest.mark.parametrize("override", ["score_interval=0", "score_interval=17"])
def test_scores_are_not_older_than_sixteen_steps(override: str) -> None:
    assert problem_of(overrides=[override]).endswith(': must be "auto" or 1 to 16')


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
    ],
)
def test_a_setting_of_an_earlier_version_is_refused_with_what_to_do_instead(override: str, advice: str) -> None:
    problem = problem_of(overrides=[override])
    assert problem.startswith(f"{override.partition('=')[0]} (override): was removed; ") and advice in problem


@pytest.mark.parametrize(("old", "new"), [("dense=never", "whole_requests")])
def test_a_setting_that_has_another_name_is_refused_with_the_new_one(old: str, new: str) -> None:
    assert problem_of(overrides=[old]) == f"{old.partition('=')[0]} (override): is called {new} now"


def test_tasks_of_the_worker_have_as_many_blocks_as_its_plan_says_unless_a_test_asks_for_others(monkeypatch) -> None:
    from sglang_hybrid.transport.messages import Plan

    assert env.WORKER_TASK_BLOCKS.get() == Plan().task_blocks
    for text in ("0", "4097", "many"):
        monkeypatch.setenv(env.WORKER_TASK_BLOCKS.name, text)
        with pytest.raises(ConfigError, match="a whole number from 1 to 4096"):
            env.WORKER_TASK_BLOCKS.get()
