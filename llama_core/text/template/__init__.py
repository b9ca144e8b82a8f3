"""A model's own chat template: Jinja2 in a sandbox, bounded in time and memory, with the template's text kept apart."""
