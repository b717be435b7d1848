"""Strikes and trials of the poison request detector, in fixed orders of events."""

from service.requests.poison_detector import PoisonRequestDetector


class Bench:
    """Detector with a simulated worker, and the unfinished requests."""

    def __init__(self, *uids: str) -> None:
        self.detector = PoisonRequestDetector()
        self.live = dict.fromkeys(uids)
        self.given = self.admit(*uids)

    def admit(self, *uids: str) -> list[str]:
        """Offer requests to the detector. Returns the requests that the worker gets."""
        return self.detector.release(uids)

    def start(self, *uids: str) -> None:
        for uid in uids:
            self.detector.record_start(uid)

    def crash(self) -> str | None:
        """Let the worker crash and return the poison request. `given` then has the requests for the next worker."""
        poison = self.detector.record_crash()
        self.live.pop(poison or "", None)
        self.given = self.admit(*self.live)
        return poison


def crashed_twice(*uids: str) -> Bench:
    bench = Bench(*uids)
    for _ in range(2):
        bench.start(*uids)
        assert bench.crash() is None
    return bench


def test_a_crash_during_a_trial_identifies_the_poison_request() -> None:
    bench = Bench("poison", "other")
    bench.start("poison")
    assert bench.crash() is None
    assert bench.given == ["poison", "other"], "one strike: beside the others"
    bench.start("poison")
    assert bench.crash() is None
    assert bench.given == ["poison"], "two strikes: alone"
    assert bench.admit("new") == []
    bench.start("poison")
    assert bench.crash() == "poison"
    assert bench.given == ["other"]
    assert bench.crash() is None


def test_a_crash_before_a_trial_starts_adds_no_strike() -> None:
    bench = crashed_twice("a")
    for _ in range(5):
        assert bench.crash() is None, "the worker had not begun it"
        assert bench.given == ["a"]
    bench.start("a")
    assert bench.crash() == "a"


def test_progress_removes_strikes() -> None:
    bench = Bench("a", "b")
    for _ in range(9):
        bench.start("a", "b")
        assert not bench.detector.record_progress("a")
        assert not bench.detector.record_progress("b")
        assert bench.crash() is None
        assert bench.given == ["a", "b"]


def test_each_suspect_runs_alone_before_any_other_work() -> None:
    bench = crashed_twice("a", "look", "b")
    assert bench.given == ["a"]
    bench.start("a")
    assert bench.detector.record_progress("a"), "a must leave the worker"
    assert bench.admit("a") == ["look"]
    assert bench.admit() == [], "one at a time"
    bench.start("look")
    bench.detector.forget("look")  # the attention query got its result
    assert bench.admit() == ["b"]
    bench.start("b")
    assert not bench.detector.record_progress("b"), "the last suspect may go on"
    assert bench.admit() == ["a"]
    assert bench.admit("c") == ["c"]
    assert bench.detector.is_empty


def test_a_crash_with_two_running_requests_identifies_no_poison_request() -> None:
    bench = crashed_twice("a", "b")
    bench.start("a", "b")
    assert bench.crash() is None


def test_a_suspect_that_ends_needs_no_trial() -> None:
    bench = crashed_twice("a", "b")
    bench.detector.forget("b")
    bench.detector.forget("a")
    assert bench.admit() == []
    assert bench.detector.is_empty
    assert bench.admit("c") == ["c"]
