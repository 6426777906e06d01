"""Faults planted in what a decision reads: compiled code lets nobody replace its own methods."""

from headway_scheduler.domain.request import Subset


class Breaking(dict):
    """Labels of a subset that break a pass over the holds while `when` says so.

    A pass looks at them first to tell pools apart, and then, at the second look, to find endpoints.
    """

    def __init__(self, when):
        self.when, self.looks = when, 0

    @property
    def subset(self):
        return Subset(labels=self)

    def items(self):
        self.looks += self.when()
        if self.looks == 2:
            raise ZeroDivisionError
        return super().items()


def outcomes(fleet):
    """What endpoints were blamed for, False: served, as far as it is remembered: served ones first."""
    records = fleet.ejections._records.values()
    served, failed = (round(sum(getattr(each, name) for each in records)) for name in ("served", "failed"))
    return [False] * (served - failed) + [True] * failed
