"""Boards for Grafana, written in Python.

In: the metrics that `pipeline.run.metric_table` lists. Out: JSON files in dashboards/, which
`python -m deploy.grafana.build` writes, and pictures of them by `python -m deploy.grafana.render`.
"""
