"""Commands about the settings and the machine: config show, check, schema; doctor.

In: settings. Out: what they resolve to, and whether everything they name is there.
"""

from __future__ import annotations

import click

from pipeline.cli.options import Sources, as_json, takes_config
from pipeline.cli.output import echo_json


@click.group()
def config() -> None:
    """Show and check settings."""


@config.command("show")
@takes_config
@as_json
@click.option("--reference", "is_reference", is_flag=True, help="Every setting with its default and why.")
def show_config(sources: Sources, is_json: bool, is_reference: bool) -> int:
    """Print the settings as they resolve, without secrets."""
    from pipeline.settings.files import masked, render_reference, show

    if is_reference:
        click.echo(render_reference(), nl=False)
        return 0
    resolved = sources.load()
    if is_json:
        echo_json(masked(resolved))
        return 0
    click.echo(show(resolved), nl=False)
    return 0


@config.command("check")
@takes_config
@click.option("--call-rewards", "calls_rewards", is_flag=True, help="Call each reward once, on made-up completions.")
def check_config(sources: Sources, calls_rewards: bool) -> int:
    """Check the settings and everything they name: data, reward functions, prompts, model."""
    from pipeline.checks.config import check

    report = check(sources.load(), calls_rewards=calls_rewards)
    for subject, text in report.facts:
        click.echo(f"{subject:<8}  {text}")
    for warning in report.warnings:
        click.echo(f"warning: {warning}", err=True)
    click.echo("OK")
    return 0


@config.command("schema")
def config_schema() -> int:
    """Print the JSON schema of the settings, for editors."""
    from pipeline.settings.files import schema

    echo_json(schema())
    return 0


@click.command()
@takes_config
@as_json
def doctor(sources: Sources, is_json: bool) -> int:
    """Say whether this machine has what rollstream needs."""
    from pipeline.checks.doctor import examine
    from pipeline.checks.findings import render

    findings = examine(sources.load())
    if is_json:
        echo_json({"ok": all(finding.is_ok for finding in findings), "findings": findings})
    if not is_json:
        click.echo(render(findings))
    return 0 if all(finding.is_ok for finding in findings) else 1
