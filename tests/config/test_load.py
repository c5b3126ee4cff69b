"""Loading: precedence, origins and every problem at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omni_bus.cli.deployment import adapter_class, gateway_class
from omni_bus.config.load import Loaded, load, parse_value
from omni_bus.core.pipeline import Pipeline
from omni_bus.core.quota import Quota
from omni_bus.engine import Engine
from omni_bus.errors import ConfigError, unknown_name

CONFIGS = Path(__file__).parents[2] / "configs"


class EchoOptions(msgspec.Struct, frozen=True):
    """Options of one adapter."""

    model: str = "small"
    speed: Annotated[float, msgspec.Meta(ge=0.5, le=2)] = 1.0
    words: tuple[str, ...] = ()
    must_exist: str = ""


class Echo(Engine):
    """An adapter whose check looks at one option."""

    accepts: ClassVar = {"text": "text"}
    emits: ClassVar = {"text": "text"}
    Options = EchoOptions

    @classmethod
    def check(cls, options: EchoOptions) -> list[str]:
        return [f"must_exist: {options.must_exist} is not there"] if options.must_exist else []

    def load(self, report: Any) -> None:
        raise AssertionError("checking a deployment loads no engine")


class TextGateway:
    """A gateway with one option of its own."""

    class Options(msgspec.Struct):
        """One key."""

        api_keys: tuple[str, ...] = ()

    @classmethod
    def can_serve(cls, pipeline: Pipeline) -> bool:
        return "text" in pipeline.outputs


class NoEngine:
    """What a person may name by mistake."""


def _adapter(name: str) -> Any:
    table = {"echo": Echo, "no-engine": NoEngine}
    if name not in table:
        raise unknown_name("adapter", name, table)
    return table[name]


def _gateway(name: str) -> Any:
    if name != "text":
        raise unknown_name("gateway", name, ["text"])
    return TextGateway


GOOD = """[stages.echo]
adapter = "echo"
[pipelines.chat]
edges = ["in.text -> echo.text", "echo.text -> out.text"]
[gateways.text]
port = 8000
"""


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _load(
    file: str = "d.toml", overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None, platform: str = "cpu"
) -> Loaded:
    return load(
        file,
        overrides,
        environ=environ or {},
        platform=platform,
        adapter_class=_adapter,
        gateway_class=_gateway,
    )


def _problems(text: str, **arguments: Any) -> list[str]:
    Path("d.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        _load(**arguments)
    return list(caught.value.problems)


def test_step_timeout_may_be_switched_off_but_not_negative() -> None:
    (problem,) = _problems(GOOD, overrides=["stages.echo.step_timeout_s=-1"])

    allowed = "allowed: a number, at least 0 and at most 86400"
    assert problem.endswith(f"stages.echo.step_timeout_s: -1 is not allowed; {allowed}")
    Path("d.toml").write_text(GOOD)
    assert _load(overrides=["stages.echo.step_timeout_s=0"]).config.stages["echo"].step_timeout_s == 0.0


def test_good_file_becomes_structs_with_defaults_filled_in() -> None:
    Path("my chat.toml").write_text(GOOD)

    loaded = _load("my chat.toml")

    assert loaded.config.name == "my_chat"
    assert loaded.config.stages["echo"].replicas == 1
    assert loaded.config.pipelines["chat"].serve_as == "chat"
    assert loaded.config.gateways["text"].protocol == "text"
    assert loaded.adapters == {"echo": Echo}
    assert loaded.protocols == {"text": TextGateway}
    assert loaded.served == {"text": ("chat",)}
    assert str(loaded.origin("gateways.text.port")) == "my chat.toml:6"
    assert str(loaded.origin("pipelines.chat.edges[1]")) == "my chat.toml:4"
    assert str(loaded.origin("stages.echo.replicas")) == "default"


def test_loaded_config_survives_the_wire() -> None:
    Path("d.toml").write_text(GOOD)
    config = _load().config

    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=type(config)) == config


def test_each_source_wins_over_those_before_it() -> None:
    """Each of seven places sets the keys from its own number on; the last place that set a key must win."""
    keys = ["replicas", "threads", "max_input_bytes", "model", "speed", "words", "must_exist"]
    values = ["1", "2", "3", '"m{}"', "1.{}", '["w{}"]', '""']

    def lines(place: int) -> str:
        chosen = list(zip(keys, values, strict=True))[place:6]
        return "\n".join(f"{key} = {value.format(place)}" for key, value in chosen)

    Path("far.toml").write_text(
        f'[stages.echo]\nadapter = "echo"\n{lines(0)}\n[platform.cpu.stages.echo]\n{lines(3)}\n'
        + GOOD.split("\n", 2)[2]
    )
    Path("sub").mkdir()
    Path("sub/near.toml").write_text(f'base = "../far.toml"\n[stages.echo]\n{lines(1)}\n')
    Path("d.toml").write_text(
        f'base = "sub/near.toml"\n[stages.echo]\n{lines(2)}\n[platform.cpu.stages.echo]\n{lines(4)}\n'
        "[platform.cuda.stages.echo]\nreplicas = 99\n"
    )
    environ = {"OMNI_BUS__STAGES__ECHO__WORDS": '["w5"]', "OMNI_BUS__STAGES__ECHO__MODEL": "m5", "OMNI_BUS_X": "1"}
    loaded = _load(overrides=["stages.echo.model=m6", "stages.echo.model=m7"], environ=environ)

    stage = loaded.config.stages["echo"]
    origin = {key: str(loaded.origin(f"stages.echo.{key}")) for key in keys}
    assert (stage.replicas, origin["replicas"]) == (1, "far.toml:3")
    assert (stage.threads, origin["threads"]) == (2, "sub/near.toml:3")
    assert (stage.max_input_bytes, origin["max_input_bytes"]) == (3, "d.toml:3")
    assert stage.options["speed"] == 1.4
    assert origin["speed"] == "d.toml:8"
    assert (stage.options["words"], origin["words"]) == (["w5"], "environment OMNI_BUS__STAGES__ECHO__WORDS")
    assert (stage.options["model"], origin["model"]) == ("m7", "-o stages.echo.model=m7")


def test_platform_of_a_base_wins_over_the_plain_file() -> None:
    Path("far.toml").write_text(GOOD + "[platform.cuda.stages.echo]\nreplicas = 3\n")
    Path("d.toml").write_text('base = "far.toml"\n[stages.echo]\nreplicas = 2\n')

    assert _load(platform="cuda").config.stages["echo"].replicas == 3
    assert _load(platform="rocm").config.stages["echo"].replicas == 2


def test_lists_are_replaced_whole_with_their_lines() -> None:
    Path("far.toml").write_text(GOOD.replace('"echo"', '"echo"\nwords = ["a", "b", "c"]'))
    Path("d.toml").write_text('base = "far.toml"\n[stages.echo]\nwords = ["x"]\n')
    loaded = _load()

    assert loaded.config.stages["echo"].options["words"] == ["x"]
    assert str(loaded.origin("stages.echo.words[0]")) == "d.toml:3"
    assert "stages.echo.words[1]" not in loaded.origins


def test_environment_finds_keys_with_dashes_and_capitals() -> None:
    Path("d.toml").write_text(GOOD.replace("stages.echo", "stages.My-Echo").replace("echo.text", "My-Echo.text"))

    loaded = _load(environ={"OMNI_BUS__STAGES__MY_ECHO__REPLICAS": "4"})

    assert loaded.config.stages["My-Echo"].replicas == 4


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2", 2),
        ("2.5", 2.5),
        ("true", True),
        ('"2"', "2"),
        ('["a", 1]', ["a", 1]),
        ("{ a = 1 }", {"a": 1}),
        ("Qwen/Qwen2.5", "Qwen/Qwen2.5"),
        ("", ""),
        ("a b", "a b"),
        ("1\nb = 2", "1\nb = 2"),
    ],
)
def test_override_values_are_toml_or_text(text: str, value: object) -> None:
    assert parse_value(text) == value


def test_all_problems_come_at_once_each_with_its_place() -> None:
    text = """stage = 1
drain_timeout_s = inf
[stages.llm]
adapter = "ecko"
[stages.echo]
adapter = "echo"
replica = 2
replicas = 0
threads = true
speed = 3
words = ["a", 5, 6]
[pipelines.chat]
edges = ["in.text -> echo.text",
  "echo.text -> out.text",
  7,
  "echo.text -> ecco.text"]
timeout_s = "soon"
[gateways.text]
port = 80000
key = 1
pipelines = ["chta"]
[gateways.www]
[platform.cuda.stages.echo]
replicas = -1
"""

    problems = _problems(text, overrides=["nothing", "stages.echo.modle=x"], environ={"OMNI_BUS__BIND": "udp"})

    starts = [
        "d.toml:1: stage: unknown key; did you mean 'stages'?",
        "d.toml:2: drain_timeout_s: inf is not allowed; allowed: a finite number",
        "d.toml:4: stages.llm.adapter: unknown adapter 'ecko'; did you mean 'echo'?",
        "d.toml:7: stages.echo.replica: unknown key; did you mean 'replicas'?",
        "d.toml:8: stages.echo.replicas: 0 is not allowed; allowed: an integer, at least 1",
        "d.toml:9: stages.echo.threads: true is not allowed; allowed: an integer, at least 1",
        "d.toml:10: stages.echo.speed: 3 is not allowed; allowed: a number, at least 0.5 and at most 2",
        "d.toml:11: stages.echo.words[1]: 5 is not allowed; allowed: text",
        "d.toml:11: stages.echo.words[2]: 6 is not allowed; allowed: text",
        "d.toml:15: pipelines.chat.edges[2]: 7 is not allowed; allowed: text",
        "d.toml:16: pipelines.chat.edges[3]: unknown stage 'ecco'; did you mean 'echo'?",
        'd.toml:17: pipelines.chat.timeout_s: "soon" is not allowed; allowed: a number, above 0',
        "d.toml:19: gateways.text.port: 80000 is not allowed; allowed: an integer, at least 0 and at most 65535",
        "d.toml:20: gateways.text.key: unknown key (known: api_keys, host,",
        "d.toml:21: gateways.text.pipelines[0]: unknown pipeline 'chta'; did you mean 'chat'?",
        "d.toml:22: gateways.www: unknown gateway 'www' (known: text)",
        "-o stages.echo.modle=x: stages.echo.modle: unknown key; did you mean 'model'?",
        'environment OMNI_BUS__BIND: bind: "udp" is not allowed; allowed: "ipc" or "tcp://ADDRESS"',
        "-o nothing: not a setting; the form is -o dotted.key=value",
        "d.toml:24: platform cuda: stages.echo.replicas: -1 is not allowed; allowed: an integer, at least 1",
    ]
    assert len(problems) == len(starts)
    for problem, start in zip(problems, starts, strict=True):
        assert problem.startswith(start)


def test_missing_adapter_is_placed_at_its_table() -> None:
    problems = _problems(GOOD.replace('adapter = "echo"', "replicas = 1"))

    assert problems == ["d.toml:1: stages.echo.adapter: is missing; allowed: text"]


def test_misspelt_adapter_is_named() -> None:
    problems = _problems(GOOD.replace('adapter = "echo"', 'adaptor = "echo"\nreplica = 2\nmodel = "any"'))

    assert problems == [
        "d.toml:1: stages.echo.adapter: is missing; allowed: text",
        "d.toml:2: stages.echo.adaptor: unknown key; did you mean 'adapter'?",
        "d.toml:3: stages.echo.replica: unknown key; did you mean 'replicas'?",
    ]


def test_reasons_of_an_adapter_are_problems() -> None:
    problems = _problems(GOOD, overrides=["stages.echo.must_exist=w.bin"])

    assert problems == ["-o stages.echo.must_exist=w.bin: stages.echo.must_exist: w.bin is not there"]


def test_reason_about_an_unwritten_key_is_placed_at_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Echo, "check", lambda _: ["model: not here", "adapter: needs x", "both: no key", "plain"])

    assert _problems(GOOD) == [
        "d.toml:1: stages.echo.model: not here",
        "d.toml:1: stages.echo: both: no key",
        "d.toml:1: stages.echo: plain",
        "d.toml:2: stages.echo.adapter: needs x",
    ]


def test_class_that_is_no_engine_is_refused() -> None:
    (problem,) = _problems(GOOD.replace('"echo"', '"no-engine"'))

    assert problem.startswith("d.toml:2: stages.echo.adapter: 'no-engine' can't be used")


def test_name_without_a_table_is_still_known_to_edges() -> None:
    assert _problems("stages.echo = 3\n" + GOOD[GOOD.index("[pipelines") :]) == [
        "d.toml:1: stages.echo: 3 is not allowed; allowed: a table"
    ]


def test_pipeline_without_edges_says_what_an_edge_is() -> None:
    problems = _problems(GOOD.replace("edges", "aliases"))

    assert problems[0].startswith('d.toml:3: pipelines.chat.edges: is missing; allowed: a list of "source.port -> ')


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("stages = 3", "d.toml:1: stages: 3 is not allowed; allowed: tables [stages.NAME]"),
        ("[stages]\nllm = 3", "d.toml:2: stages.llm: 3 is not allowed; allowed: a table"),
        ("[platform.cude]", "d.toml:1: platform.cude: unknown platform 'cude'; did you mean 'cuda'?"),
        ("platform = 3", "d.toml:1: platform: 3 is not allowed"),
        ("[platform.cuda]\nbase = 'x'", "d.toml:2: platform.cuda.base: 'base' is not allowed inside"),
        ("\nbase = 3", "d.toml:2: base: 3 is not allowed; allowed: the path of a TOML file"),
        ("base = 'no.toml'", "d.toml:1: base: no.toml: no such file"),
        ("a = 1\nb = = 2", "d.toml:2:5: not valid TOML: Invalid value in: b = = 2"),
        ("a = 1\nb = [2,\n", "d.toml:2:8: not valid TOML: Invalid value, where the file ends"),
        ("a = " + "[" * 3000, "d.toml: lists or tables are nested too deeply"),
        (
            "cuda_bytes = 5000",
            "d.toml:1: cuda_bytes: 5000 is not allowed; allowed: 0 or a multiple of 4096",
        ),
        ("arena_bytes = -1", "d.toml:1: arena_bytes: -1 is not allowed; allowed: 0 or up to 64 GiB"),
        ("name = 'a/b'", "d.toml:1: name: \"a/b\" is not allowed; allowed: 1 to 64 letters, digits, '_' or '-'"),
    ],
)
def test_wrong_forms_are_told_with_their_place(text: str, start: str) -> None:
    assert any(problem.startswith(start) for problem in _problems(text))


def test_circle_of_bases_is_refused_with_its_path() -> None:
    Path("a.toml").write_text('\nbase = "b.toml"')
    Path("b.toml").write_text('base = "d.toml"')

    assert _problems('base = "a.toml"') == [
        "b.toml:1: base: the files go round in a circle: d.toml -> a.toml -> b.toml -> d.toml"
    ]


def test_missing_file_and_folder_suggest_a_file() -> None:
    Path("voice_chat.toml").write_text(GOOD)

    with pytest.raises(ConfigError, match=r"^voice_cat.toml: no such file; did you mean 'voice_chat.toml'\?$"):
        _load("voice_cat.toml")
    with pytest.raises(ConfigError, match=r"^\.: is a directory; .* did you mean 'voice_chat.toml'\?$"):
        _load(".")


def test_bytes_that_are_no_text_are_refused() -> None:
    Path("d.toml").write_bytes(b"a = 1\nb = '\xff'\n")

    with pytest.raises(ConfigError, match=r"^d.toml:2: not UTF-8: byte 0xff$"):
        _load()


def test_windows_line_ends_and_byte_order_mark_are_read() -> None:
    Path("d.toml").write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())

    assert str(_load().origin("gateways.text.port")) == "d.toml:6"


@pytest.mark.parametrize("source", ["-o base=x", "environment OMNI_BUS__PLATFORM__CPU__BIND"])
def test_base_and_platform_are_for_files_only(source: str) -> None:
    overrides = [source.removeprefix("-o ")] if source.startswith("-o") else []
    environ = {} if overrides else {source.removeprefix("environment "): "ipc"}

    (problem,) = _problems(GOOD, overrides=overrides, environ=environ)

    assert problem.startswith(f"{source}: ")
    assert problem.endswith("can only be written in a file")


@pytest.mark.parametrize("text", ["a", "a b=1", "=1", "a.=1", "a #=1", "edges[0]=1", "[x]=1"])
def test_argument_that_is_no_setting_is_refused(text: str) -> None:
    assert _problems(GOOD, overrides=[text])[0].startswith(f"-o {text}: not a setting")


def test_secret_is_not_shown_in_a_problem_or_origin() -> None:
    problems = _problems(GOOD, overrides=['gateways.text.api_keys="hush"'])

    assert problems == [
        '-o gateways.text.api_keys=***: gateways.text.api_keys: "***" is not allowed; allowed: a list of text'
    ]


@pytest.mark.parametrize(
    "broken",
    ['keys = ["hush', 'keys = [\n  "other",\n  "hush\n]', '"keys" = "hush', "callers.a.keys = hush", "key = 'hush"],
)
def test_secret_is_not_shown_in_a_line_that_is_no_toml(broken: str) -> None:
    (problem,) = _problems(f"{GOOD}[callers.a]\n{broken}\n")

    assert "not valid TOML" in problem
    assert "hush" not in problem


# --- callers ------------------------------------------------------------------------------------------------


def test_caller_has_keys_and_limits() -> None:
    Path("d.toml").write_text(
        f"""{GOOD}
[callers.gold]
keys = ["k1", "k2"]
key_file = "gold.keys"
weight = 4
max_in_flight = 2
max_queued = 0
requests_per_minute = 30
burst = 5
max_priority = 1
[callers.other]
key_env = "OTHER_KEY"
"""
    )
    callers = _load(overrides=["callers.other.weight=0.5"]).config.callers

    assert callers["gold"].keys == ("k1", "k2")
    assert callers["gold"].quota == Quota(4.0, 2, 0, 30.0, 5, 1)
    assert callers["other"].quota == Quota(0.5)


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ("[callers.a]", "callers.a: has no key; add keys, key_env or key_file"),
        ('[callers.a]\nkeys = [""]', 'callers.a.keys[0]: "" is not allowed; allowed: text without blanks'),
        ('[callers.a]\nkeys = ["a b"]', 'callers.a.keys[0]: "***" is not allowed; allowed: text without blanks'),
        ('[callers.a]\nkeys = "hush"', 'callers.a.keys: "***" is not allowed; allowed: a list of text without blanks'),
        ('[callers.a]\nkeys = ["k"]\nweight = 0', "at least 0.001 and at most 1000"),
        ('[callers.a]\nkeys = ["k"]\nweight = nan', "callers.a.weight: nan is not allowed"),
        ('[callers.a]\nkeys = ["k"]\nmax_in_flight = 0', "callers.a.max_in_flight: 0 is not allowed"),
        ('[callers.a]\nkeys = ["k"]\nrequests_per_minute = 0', "callers.a.requests_per_minute: 0 is not allowed"),
        ('[callers.a]\nkeys = ["k"]\nburst = 2', "callers.a.burst: has no meaning without requests_per_minute"),
        ('[callers.a]\nkeys = ["k"]\nwieght = 2', "callers.a.wieght: unknown key; did you mean 'weight'?"),
        ('[callers."a b"]\nkeys = ["k"]', 'callers."a b": "a b" is not allowed; allowed: 1 to 64 letters'),
        ('[callers.a]\nkeys = ["k"]\n[callers.b]\nkeys = ["j", "k"]', "caller 'a' has one of these keys already"),
        ("callers = 3", "callers: 3 is not allowed; allowed: tables [callers.NAME]"),
        ("[callers]\na = 3", "callers.a: 3 is not allowed; allowed: a table"),
    ],
)
def test_caller_that_makes_no_sense_is_refused(table: str, problem: str) -> None:
    text = f"{table}\n{GOOD}" if table.startswith("callers") else f"{GOOD}{table}\n"

    (found,) = _problems(text)

    assert problem in found
    assert "hush" not in found


def test_keys_of_callers_are_hidden_wherever_they_are_written() -> None:
    problems = _problems(
        GOOD,
        overrides=['callers.a.keys=["hush", 3]'],
        environ={"OMNI_BUS__CALLERS__B__KEYS": '["hush", 4]'},
    )

    assert len(problems) == 2
    assert "hush" not in "".join(problems)


def test_bytes_in_an_argument_that_are_no_text_are_refused() -> None:
    text = b"stages.echo.model=\xff".decode("utf-8", "surrogateescape")
    environ = {"OMNI_BUS__NAME": b"\xff".decode("utf-8", "surrogateescape")}

    assert _problems(GOOD, overrides=[text], environ=environ) == [
        "environment OMNI_BUS__NAME: not UTF-8",
        f"-o {text}: not UTF-8",
    ]


def test_problem_with_line_breaks_stays_on_one_line() -> None:
    (problem,) = _problems(GOOD, overrides=["stages.echo.replicas=a\nb"])

    assert problem == (
        '-o stages.echo.replicas=a b: stages.echo.replicas: "a\\nb" is not allowed; allowed: an integer, at least 1'
    )


_KEYS = st.sampled_from(
    [
        "stages",
        "echo",
        "pipelines",
        "chat",
        "gateways",
        "text",
        "edges",
        "replicas",
        "port",
        "words",
        '""',
        '"a b"',
        "x",
    ]
)
_VALUES = st.one_of(
    st.sampled_from(
        ["1", "-1", "0", "1e400", "nan", "true", "[]", "{}", "[[]]", "[1, {}]", "{ a = [] }", "''", "'in'"]
    ),
    st.sampled_from(["07:32:00", "1979-05-27", "9" * 40, "['a -> b']", "['in.x -> echo.text', 3]", "{ text = 'x' }"]),
    st.text(max_size=8),
)


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.lists(_KEYS, min_size=1, max_size=4), _VALUES), max_size=4))
def test_random_damage_gives_problems_and_nothing_else(damage: list[tuple[list[str], str]]) -> None:
    Path("d.toml").write_text(GOOD)
    try:
        loaded = _load(overrides=[f"{'.'.join(keys)}={value}" for keys, value in damage])
    except ConfigError as error:
        assert error.problems
        assert all(": " in problem and "\n" not in problem for problem in error.problems)
    else:
        assert loaded.pipelines["chat"].edges
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(loaded.config), type=type(loaded.config)) == loaded.config


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(0, len(GOOD)), st.integers(0, 12), st.text(st.sampled_from("[]{}=.\"'#\n,ax1\\ \t\x00é"), max_size=6)
)
def test_random_bytes_in_the_file_give_problems_and_nothing_else(at: int, length: int, text: str) -> None:
    Path("d.toml").write_text(GOOD[:at] + text + GOOD[at + length :])
    try:
        _load()
    except ConfigError as error:
        assert all(problem.startswith("d.toml") for problem in error.problems)


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
@pytest.mark.parametrize("platform", ["cpu", "cuda", "rocm"])
def test_shipped_config_is_good(file: Path, platform: str) -> None:
    loaded = load(file, environ={}, platform=platform, adapter_class=adapter_class, gateway_class=gateway_class)

    assert loaded.pipelines


def test_stage_params_are_the_adapters_own(tmp_path: Path) -> None:
    """A default parameter is checked like an option: unknown names and bad values are refused with their key."""
    file = tmp_path / "d.toml"
    file.write_text(
        '[stages.llm]\nadapter = "llamacpp"\nparams = { temperature = 9.0, tempratur = 1 }\n'
        '[pipelines.chat]\nedges = ["in.messages -> llm.prompt", "llm.text -> out.text"]\n'
    )
    with pytest.raises(ConfigError) as caught:
        load(file, environ={}, platform="cpu", adapter_class=adapter_class, gateway_class=gateway_class)
    said = "\n".join(caught.value.problems)
    assert "stages.llm.params.temperature: 9.0" in said
    assert "stages.llm.params.tempratur: unknown key; did you mean 'temperature'?" in said


class _Side(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    size: int = 1


class _TablesOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sides: dict[str, _Side] = {}


class Tables(Echo):
    """An adapter whose option is a table of tables with names of the user's."""

    Options = _TablesOptions  # type: ignore[assignment] (another class's)

    @classmethod
    def check(cls, options: Any) -> list[str]:
        return []


def test_option_may_be_a_table_of_tables_by_free_names(tmp_path: Path) -> None:
    file = tmp_path / "d.toml"

    def tables(sides: str) -> Any:
        file.write_text(
            f'[stages.echo]\nadapter = "tables"\n{sides}\n'
            '[pipelines.echo]\nedges = ["in.text -> echo.text", "echo.text -> out.text"]\n'
        )
        return load(
            file, environ={}, platform="cpu", adapter_class=lambda _: Tables, gateway_class=gateway_class
        ).config.stages["echo"]

    assert tables('[stages.echo.sides."a/b"]\nsize = 2').options == {"sides": {"a/b": {"size": 2}}}
    with pytest.raises(ConfigError) as caught:
        tables('[stages.echo.sides."a/b"]\nsiez = 2\n[stages.echo.sides.c]\nsize = "x"')
    said = "\n".join(caught.value.problems)
    assert """stages.echo.sides."a/b".siez: unknown key; did you mean 'size'?""" in said
    assert 'stages.echo.sides.c.size: "x" is not allowed; allowed: an integer' in said


BRANCHING = """
[stages.llm]
adapter = "synthetic-text"
max_num_seqs = 4
max_resident = 4
[stages.one]
adapter = "synthetic-relay"
max_num_seqs = 2
replicas = 2
[stages.two]
adapter = "synthetic-speech"
max_num_seqs = 4
[pipelines.chat]
max_in_flight = {max_in_flight}
edges = [
  "in.messages -> llm.prompt",
  "llm.text -> one.text",
  "llm.text -> two.text",
  "one.text -> out.text",
  "two.audio -> out.audio",
]
"""


def test_branching_pipeline_needs_a_slot_for_each_request(tmp_path: Path) -> None:
    """Two requests could otherwise hold each other's last slot for ever."""

    def problems(max_in_flight: int) -> str:
        file = tmp_path / "d.toml"
        file.write_text(BRANCHING.format(max_in_flight=max_in_flight))
        try:
            load(file, environ={}, platform="cpu", adapter_class=adapter_class, gateway_class=gateway_class)
        except ConfigError as error:
            return "\n".join(error.problems)
        return ""

    assert problems(4) == ""
    for stage in ("llm", "one", "two"):
        assert f"stage '{stage}' holds 4, max_in_flight of chat is 5 (allowed: at most 4 in all)" in problems(5)
