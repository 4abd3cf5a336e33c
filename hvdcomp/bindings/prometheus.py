"""Serves the costs of a training run to Prometheus, on a port of the training process.

Training steps do no extra work for this. The thread that answers a request of Prometheus only reads the ledger. This
thread does not wait for the device, because only the training thread records measured times in the ledger.
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
    """Provides the metrics of one `Compression` to a `prometheus_client.CollectorRegistry`. docs/metrics.md lists the
    metrics.

    Args:
        compression: the `Compression` of the training run.
    """

    def __init__(self, compression: UsedCompression) -> None:
        self._compression = compression

    def collect(self) -> Iterator[Any]:
        """Yields all metrics, including those without a value. The registry calls this method for each request of
        Prometheus."""
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
        # All tensors with the same method and level are one time series. A time series for each tensor would mean
        # hundreds of time series.
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
    """Answers requests of Prometheus in a separate thread until `close` is called. The server can be used as a context
    manager. `serve_metrics` creates the server.

    Attributes:
        port: the port on which the server listens.
    """

    def __init__(self, compression: UsedCompression, port: int, address: str) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry()
        registry.register(Collector(compression))
        self._server, self._thread = start_http_server(port, address, registry)
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stops the server, and frees the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def serve_metrics(compression: UsedCompression, port: int, address: str = "127.0.0.1") -> MetricsServer:
    """Serves the costs of a training run to Prometheus at `http://HOST:PORT/metrics`. Call this function once, on rank
    0.

        if hvd.rank() == 0:
            hvdcomp.serve_metrics(compression, 9400)

    The port has no access control. By default, only programs on the same host can reach it. Training steps do no extra
    work for the server, and do not wait for the device because of it.

    Args:
        compression: the `Compression` of the training run.
        port: port to listen on; 0 for any free port. The attribute `port` of the result is the port in use.
        address: address of this host to listen on; "0.0.0.0" for all addresses, so that other hosts can read the
            metrics.

    Returns:
        The server. The server stops when the process ends, or when you call `close()`.

    Raises:
        ConfigurationError: if prometheus_client is not installed, or if the port is not available.
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
