"""The history of a run's attempts."""

import time

from ptdmpi.lineage import attempts


def test_an_illegal_time_zone_is_no_failure(monkeypatch):
    monkeypatch.setenv("TZ", "XXX-99:99")
    time.tzset()
    try:
        assert attempts._now().endswith("+00:00")
    finally:
        monkeypatch.undo()
        time.tzset()
