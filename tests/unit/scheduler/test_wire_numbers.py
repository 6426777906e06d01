"""What does not fit into a field of the wire is the nearest that does."""

from math import inf, nan

import numpy as np
import pytest
from fakes.rig import Rig
from headway_scheduler.rpc.convert.fleet import endpoint_to_proto
from headway_scheduler.rpc.convert.numbers import uint32

MOST = 2**32 - 1


TOLD = {0: 0, -1: 0, -inf: 0, nan: 0, 1.9: 1, MOST: MOST, MOST + 1: MOST, 5e9: MOST, 1e300: MOST, inf: MOST}


@pytest.mark.parametrize(("value", "told"), TOLD.items())
def test_uint32(value, told):
    assert uint32(value) == uint32(np.float64(value)) == told


def test_a_column_beyond_a_field_is_told_as_its_most():
    rig = Rig()
    (slot,) = rig.endpoints(1)
    rig.columns.external[slot] = 5e9
    endpoint = rig.fleet.by_slot[slot]
    assert endpoint_to_proto(rig.scheduler, endpoint, 0.0).inflight == MOST
