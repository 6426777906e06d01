"""Real engines on this machine, with Headway before them: `headway bench vllm`."""
