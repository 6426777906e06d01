"""Synthetic workloads: pure objects, driven by the HTTP driver or by the simulator."""

from headway_sim.workloads.article import ArticleWorkload, Message, SessionTurns, Turn

__all__ = ["ArticleWorkload", "Message", "SessionTurns", "Turn"]
