"""OpenTelemetry's spans and W3C trace context, for the scheduler and the gateway. Off, nothing of it is imported."""
