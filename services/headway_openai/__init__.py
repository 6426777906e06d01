"""The OpenAI API as those who stand between its users and engines read and write it: bodies, streams, errors."""
