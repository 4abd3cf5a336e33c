"""Costs of a training for Prometheus, on a port of the training's process.

Steps do no extra work. The thread that answers a scrape reads the ledger. It waits for no device, and leaves it to the
training's own thread to record measured times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from hvdcomp.bindings.metrics import mean_levels
from hvdcomp.bindings.setup import UsedCompression, require_compression
from hvdcomp.errors import ConfigurationError

_PHASES = ("encode", "communicate", "decode")


class Collector:
    """The metrics of one compression, for a `prometheus_client.CollectorRegistry`. docs/metrics.md lists them.

    Args:
        compression: the compression of the training.
    """

    def __init__(self, compression: UsedCompression) -> None:
        self._compression = compression

    def collect(self) -> Iterator[Any]:
        """All metrics, with or without a value; called by the registry for each scrape."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

        settings, ledger, plan = self._compression.settings, self._compression.ledger, self._compression.plan
        cost, steps = ledger.of_this_process()
        last = ledger.last
        described = {"compressor": str(settings.compressor), "policy": str(settings.policy or "")}
        yield InfoMetricFamily(
            "hvdcomp", "The compressor and the policy, written as spec strings such as topk:ratio=0.01.", described
        )
        for name, meaning, value in (
            ("steps", "Number of training steps that this process has made.", steps),
            ("sent_bytes", "Bytes of gradients that this rank has sent.", cost.bytes_sent),
            (
                "sent_in_node_bytes",
                "The part of hvdcomp_sent_bytes that was sent to ranks of the same node.",
                cost.bytes_in_node,
            ),
            ("dense_bytes", "Bytes that the same gradients have without compression.", cost.dense_bytes),
        ):
            yield CounterMetricFamily(f"hvdcomp_{name}", meaning, value)
        seconds = CounterMetricFamily(
            "hvdcomp_step_seconds",
            "Seconds that hvdcomp has spent in each phase of the training steps.",
            labels=["phase"],
        )
        for phase in _PHASES:
            seconds.add_metric([phase], getattr(cost, f"{phase}_seconds") or 0.0)
        yield seconds
        factor = None if last is None else last.compression_factor
        yield GaugeMetricFamily(
            "hvdcomp_compression_factor",
            "Compression factor of the latest step: uncompressed bytes / sent bytes, without the bytes that stay "
            "within the node.",
            factor,
        )
        levels = GaugeMetricFamily(
            "hvdcomp_mean_level",
            "Mean compression level (such as ratio, rank or bits) of the tensors whose compressor has a level.",
            labels=["kind"],
        )
        for kind, mean in mean_levels(plan).items():
            levels.add_metric([kind], mean)
        yield levels
        # One series for all tensors of a method and level; a label for each tensor would be hundreds of series.
        tensors = GaugeMetricFamily(
            "hvdcomp_tensors",
            "Number of tensors that are compressed with this method and level.",
            labels=["method", "level"],
        )
        alike = Counter((used.name, "" if used.level is None else f"{used.level:g}") for used in plan.values())
        for labels, count in sorted(alike.items()):
            tensors.add_metric(labels, count)
        yield tensors


class MetricsServer:
    """Answers Prometheus in a thread of its own until `close`; a context manager. `serve_metrics` makes it.

    Attributes:
        port: port of the server.
    """

    def __init__(self, compression: UsedCompression, port: int, address: str) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry()
        registry.register(Collector(compression))
        self._server, self._thread = start_http_server(port, address, registry)
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stops answering and frees the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def serve_metrics(compression: UsedCompression, port: int, address: str = "127.0.0.1") -> MetricsServer:
    """Serves the costs of a training to Prometheus at `http://HOST:PORT/metrics`. Call it once, on rank 0.

        if hvd.rank() == 0:
            hvdcomp.serve_metrics(compression, 9400)

    The port has no access control. By default only this host can reach it. Steps do no extra work, and do not wait for
    a device.

    Args:
        compression: the compression of the training.
        port: port to listen on; 0 for any free port, which is then the server's `port`.
        address: address of this host to listen on; "0.0.0.0" for all addresses, so that other hosts may scrape.

    Returns:
        The server. It ends with the process, or by `close()`.

    Raises:
        ConfigurationError: if prometheus_client is not installed, or the port is not available.
    """
    require_compression(compression, "hvdcomp.serve_metrics")
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
        raise ConfigurationError(f"port {port!r} is not allowed; give a whole number from 0 to 65535, such as 9400")
    try:
        return MetricsServer(compression, port, address)
    except ImportError:
        raise ConfigurationError(
            "metrics for Prometheus need the package prometheus_client: pip install 'hvdcomp[metrics]'"
        ) from None
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on port {port} of {address}: {error.strerror or error}. Give another port, or end the "
            "program that uses it"
        ) from None
