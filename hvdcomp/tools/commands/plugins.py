"""The option `--plugin` of commands that have spec strings as arguments."""

from __future__ import annotations

import click

from hvdcomp.errors import SpecError
from hvdcomp.specs.plugins import name_modules


def _use(context: click.Context, parameter: click.Parameter, modules: tuple[str, ...]) -> None:
    if not modules or context.resilient_parsing:
        return
    from hvdcomp.compressors.parsing import COMPRESSOR_PLUGINS
    from hvdcomp.policies import POLICY_PLUGINS

    name_modules(modules)
    try:
        for module in modules:
            if not any(plugins.of_module(module) for plugins in (COMPRESSOR_PLUGINS, POLICY_PLUGINS)):
                raise SpecError(
                    f"the plugin {module!r} has neither a compressor nor a policy: it needs a subclass of "
                    "hvdcomp.Compressor or hvdcomp.policies.Policy with a `name`"
                )
    except SpecError as error:
        raise click.BadParameter(str(error), context, parameter) from None


plugin_option = click.option(
    "--plugin",
    multiple=True,
    metavar="MODULE",
    expose_value=False,
    is_eager=True,
    callback=_use,
    help="Python module with your own compressors or policies, which you can then name in spec strings; repeatable.",
)
