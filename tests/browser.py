"""Headless Chromium for tests."""

import pytest

from benchmarks.serving.browser import CHROMIUM, DESK, PHONE, SOFTWARE_GPU, Browser, open_browser

__all__ = ["CHROMIUM", "DESK", "PHONE", "SOFTWARE_GPU", "Browser", "needs_chromium", "open_browser"]

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium installed")
