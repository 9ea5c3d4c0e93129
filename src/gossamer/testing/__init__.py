"""For tests of methods, collectives and transports: workers that run any coroutine."""

from gossamer.testing.workers import Outcome, Run, Work, run_workers

__all__ = ["Outcome", "Run", "Work", "run_workers"]
