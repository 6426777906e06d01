"""When samples are acknowledged: by the scheduler's own clock, and at once where an agent waits for it."""

from headway_scheduler.rpc.telemetry import ACK_EVERY_S, Acks


def test_the_first_then_seldom_and_at_once_after_an_event():
    acks = Acks()
    seconds = [float(second) for second in range(int(2.5 * ACK_EVERY_S))]
    assert [now for now in seconds if acks.due(now)] == [0.0, ACK_EVERY_S, 2 * ACK_EVERY_S]
    acks.awaited = True
    last = seconds[-1] + 1.0
    assert acks.due(last)
    assert not acks.due(last + ACK_EVERY_S / 2), "an acknowledgement serves both"
    assert acks.due(last + ACK_EVERY_S)
