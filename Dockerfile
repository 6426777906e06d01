# syntax=docker/dockerfile:1
# One image with every program of Headway: headway-scheduler, headway-agent, headway-gateway, headway, and the engine
# emulator (python -m headway_sim.emulator). What runs is the container's command.

FROM python:3.11-bookworm AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
# The lock holds the development tools too; the image takes the part that running needs, each file by its hash.
COPY pyproject.toml requirements.lock tools/lock_subset.py ./
RUN python lock_subset.py hatchling mypy setuptools 'headway[scheduler]' > build.lock \
    && python lock_subset.py 'headway[scheduler,agent,gateway,sim,cli]' > run.lock \
    && python -m venv /opt/build && /opt/build/bin/pip install --require-hashes -r build.lock \
    && python -m venv /opt/headway && /opt/headway/bin/pip install --require-hashes -r run.lock
COPY README.md ./
COPY migrations migrations
COPY protos/gen protos/gen
COPY agents agents
COPY services services
COPY tools/compile.py tools/
# The decision path as machine code: the slim image that runs it needs no compiler.
RUN /opt/build/bin/python tools/compile.py --strict && /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir dist . \
    && /opt/headway/bin/pip install --no-deps --no-index dist/*.whl

FROM python:3.11-slim-bookworm
RUN useradd --system --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin headway
COPY --from=build /opt/headway /opt/headway
ENV PATH=/opt/headway/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 MPLCONFIGDIR=/tmp/matplotlib \
    NUMBA_CACHE_DIR=/tmp/numba
WORKDIR /tmp
USER 10001:10001
CMD ["headway", "--help"]
