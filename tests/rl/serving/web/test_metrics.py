"""Figures in Prometheus' form."""

from prometheus_client.parser import text_string_to_metric_families

from rl.serving.web.metrics import Metrics


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Value by name and labels, as Prometheus' own parser reads them."""
    families = text_string_to_metric_families(metrics.text().decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def test_what_is_counted_can_be_read() -> None:
    metrics = Metrics(lambda: {"pages_used": 3.0})
    metrics.requests.labels("chat", "200").inc()
    metrics.generated_tokens.inc(5)
    metrics.first_token.observe(0.2)
    read = samples(metrics)
    assert read["axl_requests_total", (("endpoint", "chat"), ("status", "200"))] == 1
    assert read["axl_generated_tokens_total", ()] == 5
    assert read["axl_time_to_first_token_seconds_count", ()] == 1
    assert read["axl_time_to_first_token_seconds_bucket", (("le", "0.25"),)] == 1
    assert read["axl_time_to_first_token_seconds_bucket", (("le", "0.1"),)] == 0
    assert read["axl_engine_pages_used", ()] == 3


def test_the_engines_figures_are_read_when_asked_for() -> None:
    stats = {"pages_used": 1.0}
    metrics = Metrics(lambda: stats)
    assert samples(metrics)["axl_engine_pages_used", ()] == 1
    stats["pages_used"] = 2.0
    assert samples(metrics)["axl_engine_pages_used", ()] == 2


def test_servers_of_one_process_count_apart() -> None:
    one, other = Metrics(dict), Metrics(dict)
    one.prompt_tokens.inc()
    assert samples(other)["axl_prompt_tokens_total", ()] == 0
