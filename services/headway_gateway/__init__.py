"""An OpenAI-compatible data plane: it asks Headway for an endpoint and streams the answer through."""
