"""Faults planted in what a decision reads: compiled code lets nobody replace its own methods."""

from headway_scheduler.domain.request import Subset


class Breaking(frozenset):
    """Endpoints of a subset: all of them. They break what decides while `when` says so."""

    def __new__(cls, when):
        found = super().__new__(cls, ["all"])
        found.when = when
        return found

    @property
    def subset(self):
        return Subset(self)

    def __contains__(self, name):
        if self.when():
            raise ZeroDivisionError
        return True


def outcomes(fleet):
    """What endpoints were blamed for, False: served, as far as it is remembered: served ones first."""
    records = fleet.ejections._records.values()
    served, failed = (round(sum(getattr(each, name) for each in records)) for name in ("served", "failed"))
    return [False] * (served - failed) + [True] * failed
