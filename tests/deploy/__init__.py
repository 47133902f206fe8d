"""Tests of what is in deploy/: rules, alerts and boards, also on a real Prometheus."""
