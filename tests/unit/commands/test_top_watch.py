"""``sglang-hybrid top`` against a fake server: problems, restarts, and the view in a terminal."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from io import StringIO

import pytest
from fake_metrics_server import INFO, Engine, FakeServer
from rich.console import Console

from sglang_hybrid.commands.top import names
from sglang_hybrid.commands.top.panels import NOT_EXPORTED
from sglang_hybrid.commands.top.reading import Reading, parse
from sglang_hybrid.commands.top.server import BadUrl, Kind, Server
from sglang_hybrid.commands.top.terminal import view
from sglang_hybrid.commands.top.watch import State, Watch


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


def watching(fake: FakeServer, **options: str) -> Watch:
    return Watch(Server.at(fake.url, **options), interval=2.0)


def polled(watch: Watch) -> State:
    watch.poll(ask_info=False)
    return watch.state()


def terminal_text(state: State, width: int = 150, height: int = 50, *, colours: bool = False) -> str:
    out = StringIO()
    Console(file=out, width=width, force_terminal=colours, color_system="truecolor" if colours else None).print(
        view(state, width, height)
    )
    return out.getvalue()


def test_a_server_is_shown_with_its_rates_from_the_second_reading_on(fake: FakeServer) -> None:
    watch = watching(fake)
    fake.engine.advance(2)
    first = polled(watch).points[-1]
    assert (first.running, first.rows, first.gb_per_s) == (16, 16, {})
    fake.engine.advance(2)
    second = polled(watch).points[-1]
    assert second.gb_per_s.keys() == {"worker", "gather", "device", "recall"}
    assert second.gb_per_s["worker"] > 0 == second.gb_per_s["device"]
    assert second.worker_wait is not None and 0.1 < second.worker_wait.mean_ms < 0.9
    assert len(second.layer_cpu_ratio) == fake.engine.layers


def test_no_server_is_told_with_what_to_do_and_since_when(fake: FakeServer) -> None:
    fake.stop()
    watch = watching(fake)
    problem, again = polled(watch).problem, polled(watch).problem
    assert problem is not None and again is not None
    assert problem.kind is Kind.NO_ANSWER
    assert "connection refused" in problem.text and "--url" in problem.text
    assert again.since == problem.since
    text = terminal_text(watch.state())
    assert "no answer since" in text and "asking on" in text


def test_a_server_without_metrics_is_told_which_flag_it_lacks(fake: FakeServer) -> None:
    fake.answers["/metrics"] = 404, "{}"
    problem = polled(watching(fake)).problem
    assert problem is not None and problem.kind is Kind.NO_METRICS
    assert "--enable-metrics" in problem.text


@pytest.mark.parametrize("answer", [(404, "{}"), (200, "<html></html>"), (200, "go_threads 5\n"), (500, "")])
def test_another_program_is_not_taken_for_a_server(fake: FakeServer, answer: tuple[int, str]) -> None:
    fake.answers |= {"/metrics": answer, "/v1/models": (404, "{}")}
    problem = polled(watching(fake)).problem
    assert problem is not None and problem.kind is Kind.NOT_SGLANG
    assert "no SGLang server" in problem.text and "router" in problem.text


def test_a_server_that_has_counted_nothing_yet_is_no_problem(fake: FakeServer) -> None:
    fake.answers["/metrics"] = 200, ""
    assert polled(watching(fake)).problem is None


def test_stock_sglang_is_named_and_its_own_numbers_are_shown(fake: FakeServer) -> None:
    fake.hybrid = False
    fake.info = {"attention_backend": "flashinfer", "served_model_name": "m"}
    watch = watching(fake)
    assert polled(watch).problem is None  # before /server_info names the backend, stock is not recognised
    watch.ask_info()
    state = polled(watch)
    assert state.problem is not None and state.problem.kind is Kind.STOCK
    assert "flashinfer" in state.problem.text
    assert state.points[-1].running == 16
    assert NOT_EXPORTED in terminal_text(state)


def test_our_server_without_our_metrics_is_not_taken_for_stock(fake: FakeServer) -> None:
    fake.hybrid = False
    watch = watching(fake)
    watch.ask_info()
    assert polled(watch).problem is None


def test_a_restarted_server_is_watched_on_with_its_new_settings(fake: FakeServer) -> None:
    watch = watching(fake)
    fake.engine.advance(20)
    watch.ask_info()
    polled(watch)
    fake.stop()
    assert polled(watch).problem is not None
    fake.info = INFO | {"served_model_name": "another"}
    fake.restart()
    fake.engine.advance(1)
    state = polled(watch)
    assert state.problem is None
    assert state.model is None and state.settings is None  # the old server's are forgotten
    watch.ask_info()
    assert watch.state().model == "another"
    points = state.points
    assert [point.answered for point in points] == [True, False, True]
    assert all(rate >= 0 for rate in points[-1].gb_per_s.values())
    assert points[-1].tokens_per_s is not None and points[-1].tokens_per_s >= 0


def test_a_restart_between_two_readings_gives_no_negative_rate(fake: FakeServer) -> None:
    watch = watching(fake)
    fake.engine.advance(100)
    polled(watch)
    fake.engine = Engine()
    fake.engine.advance(0.1)
    point = polled(watch).points[-1]
    assert all(rate >= 0 for rate in (*point.gb_per_s.values(), *point.miss_rows_per_s.values()))
    assert point.decode_step is not None and point.decode_step.mean_ms > 0


def test_a_view_gets_only_the_points_that_it_lacks(fake: FakeServer) -> None:
    watch = Watch(Server.at(fake.url), interval=1.0, capacity=3)
    for _ in range(5):
        polled(watch)
    assert [point.number for point in watch.state().points] == [3, 4, 5]
    assert [point.number for point in watch.state(after=4).points] == [5]


def test_settings_are_shown_and_secrets_are_not(fake: FakeServer) -> None:
    watch = watching(fake)
    watch.ask_info()
    state = polled(watch)
    assert state.settings is not None
    assert state.settings["budget_tokens"] == "2048" and state.settings["scout.recall_adapt"] == "yes"
    assert state.arguments["context_length"] == "65536" and state.facts["pool.tokens"] == "550000"
    assert "secret" not in repr(state)


def test_settings_of_a_server_with_a_key_need_the_key(fake: FakeServer) -> None:
    fake.info_key = "k"
    without, with_key = watching(fake), watching(fake, api_key="k")
    without.ask_info()
    with_key.ask_info()
    assert polled(without).settings is None and polled(without).problem is None
    assert polled(with_key).settings is not None
    assert "the server does not tell" in terminal_text(polled(without))


def test_older_servers_are_asked_for_their_settings_by_the_older_name(fake: FakeServer) -> None:
    fake.answers["/server_info"] = 404, ""
    fake.answers["/get_server_info"] = 200, '{"served_model_name": "old"}'
    watch = watching(fake)
    watch.ask_info()
    assert watch.state().model == "old"


def test_polling_asks_for_settings_once_and_does_not_wait_for_them(fake: FakeServer) -> None:
    asked, release = threading.Event(), threading.Event()
    server = Server.at(fake.url)

    class Slow(Server):
        def info(self) -> dict[str, object]:
            asked.set()
            assert release.wait(30)
            return {"served_model_name": "slow"}

    watch = Watch(Slow(server.url), interval=2.0)
    watch.poll()
    watch.poll()
    assert asked.wait(30)
    assert len(watch.state().points) == 2 and watch.state().model is None
    release.set()
    assert watch._info_thread is not None
    watch._info_thread.join(30)
    assert watch.state().model == "slow"


def test_polling_goes_on_until_it_is_stopped(fake: FakeServer) -> None:
    watch, stop = Watch(Server.at(fake.url), interval=0.1), threading.Event()
    polls = threading.Semaphore(0)
    poll = watch.poll

    def counted() -> None:
        poll(ask_info=False)
        polls.release()

    watch.poll = counted  # type: ignore[assignment,method-assign]
    thread = threading.Thread(target=watch.run, args=(stop,))
    thread.start()
    for _ in range(3):
        assert polls.acquire(timeout=30)
    stop.set()
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.parametrize("width", [60, 80, 110, 200])
@pytest.mark.parametrize("colours", [False, True])
def test_the_terminal_view_has_every_panel_and_fits_the_width(fake: FakeServer, width: int, colours: bool) -> None:
    watch = watching(fake)
    watch.ask_info()
    for load in (0.2, 0.5, 0.9):
        fake.engine.load = load
        fake.engine.advance(2)
        polled(watch)
    text = terminal_text(watch.state(), width, 60, colours=colours)
    for words in ("requests", "decode", "tokens/s", "CPU compute ratio", "recall interval", "bandwidth", "memory",
                  "worker and fallbacks", "served by", "budget_tokens=2048", "rank 0", "Qwen3-14B"):  # fmt: skip
        assert words in text, words
    assert ("▀" in text) == colours
    if not colours:
        assert max(len(line) for line in text.splitlines()) <= width


def test_a_dead_worker_is_shown_as_degraded_with_the_reason_of_the_fallback(fake: FakeServer) -> None:
    watch = watching(fake)
    polled(watch)
    fake.engine.worker_up = False
    fake.engine.advance(2)
    text = terminal_text(polled(watch), 200)
    assert "down" in text and "degraded" in text and "device-no-worker" in text


def test_a_panel_says_that_the_engine_does_not_export_it(fake: FakeServer) -> None:
    fake.engine.leave_out = (
        "sglang_hybrid_layer_cpu_compute_ratio", "sglang_hybrid_layer_recall_interval_steps",
        "sglang_hybrid_slots", "sglang_hybrid_miss_bytes_total", "sglang_hybrid_recall_bytes_total",
    )  # fmt: skip
    text = terminal_text(polled(watching(fake)))
    assert text.count(NOT_EXPORTED) >= 4
    fake.engine.leave_out = ()
    assert NOT_EXPORTED not in terminal_text(polled(watching(fake)))


def test_an_empty_view_waits_for_the_first_answer(fake: FakeServer) -> None:
    assert "waiting for the first answer" in terminal_text(watching(fake).state())


@pytest.mark.parametrize(
    ("given", "url"),
    [("http://h:1/", "http://h:1"), ("h:30000", "http://h:30000"), ("https://h/behind/", "https://h/behind")],
)
def test_urls_are_completed(given: str, url: str) -> None:
    assert Server.at(given).url == url


@pytest.mark.parametrize("given", ["file:///etc/passwd", "ftp://h", "http://", "http://h:99999", "http://h?x=1", ""])
def test_what_is_no_url_of_a_server_is_refused(given: str) -> None:
    with pytest.raises(BadUrl, match="looks like http://127"):
        Server.at(given)


@pytest.mark.parametrize("states", [None, [], ["text"], [{"sglang_hybrid": "text"}], {"0": 1}])
def test_a_server_that_tells_nothing_usable_has_no_settings(fake: FakeServer, states: object) -> None:
    fake.info = {"internal_states": states}
    watch = watching(fake)
    watch.ask_info()
    assert watch.state().settings is None and watch.state().facts == {}


def test_a_layer_that_never_recalls_has_no_interval_in_the_map(fake: FakeServer) -> None:
    fake.engine.recalls = False
    assert "no layer recalls" in terminal_text(polled(watching(fake)))


class Prepared(Server):
    """Server whose readings of one counter, with their times, a test prepares in READINGS."""

    def read(self) -> Reading:
        at, value = READINGS.pop(0)
        return parse(f'{names.MISS_BYTES}{{path="worker"}} {value}\n', at, 1_000_000.0 + at)


READINGS: list[tuple[float, float]] = []


def rates_of(*readings: tuple[float, float]) -> list[float | None]:
    """Return the rate in GB/s at each reading (seconds, GB)."""
    READINGS[:] = [(at, 1e9 * value) for at, value in readings]
    watch = Watch(Prepared("http://127.0.0.1:1"), interval=2.0)
    for _ in readings:
        watch.poll(ask_info=False)
    return [point.gb_per_s.get("worker") for point in watch.state().points]


def test_rates_are_means_of_the_last_five_seconds() -> None:
    steps = [(0, 0), (2, 0), (4, 6), (6, 6), (8, 6), (10, 6)]  # one long step, whose bytes count when it ends
    assert rates_of(*steps) == [None, 0, pytest.approx(1.5), pytest.approx(1), pytest.approx(1), 0]


def test_a_long_interval_is_not_averaged_further() -> None:
    assert rates_of((0, 0), (60, 60), (120, 60)) == [None, pytest.approx(1), 0]


def test_rates_after_a_restart_forget_the_server_before() -> None:
    assert rates_of((0, 50), (1, 52), (2, 1), (3, 2)) == [None, pytest.approx(2), pytest.approx(1), pytest.approx(1)]
