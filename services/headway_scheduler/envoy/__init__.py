"""The services that Envoy calls."""
