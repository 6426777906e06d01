"""Faults planted in what a decision reads: compiled code lets nobody replace its own methods."""

from contextlib import contextmanager

from headway_scheduler.admission.values import Work


@contextmanager
def breaking(when):
    """Whoever looks up the prefix of a request breaks, while `when(work)` says so."""
    data = Work.data

    def broken(work):
        if when(work):
            raise ZeroDivisionError
        return data.__get__(work)

    Work.data = property(broken)
    try:
        yield
    finally:
        Work.data = data


def outcomes(fleet):
    """What endpoints were blamed for, False: served, as far as it is remembered: served ones first."""
    records = fleet.ejections._records.values()
    served, failed = (round(sum(getattr(each, name) for each in records)) for name in ("served", "failed"))
    return [False] * (served - failed) + [True] * failed
