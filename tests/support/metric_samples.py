"""The samples of Prometheus text."""

from prometheus_client.parser import text_string_to_metric_families


def samples(text: bytes | str) -> dict[str, float]:
    """Each sample by its name and its labels but the model's: `name` or `name{cause="memory"}`."""
    found = {}
    for family in text_string_to_metric_families(text if isinstance(text, str) else text.decode()):
        for sample in family.samples:
            labels = ",".join(f'{key}="{sample.labels[key]}"' for key in sorted(sample.labels) if key != "model_name")
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found
