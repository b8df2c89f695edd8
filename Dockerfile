# The example application of docker-compose.yml: worker, beat and Flower from one image.
FROM python:3.13-slim@sha256:7c61056e61ac89e852de05f3dc6fa51a6dd2181797bceed46aa725dd7cb2cd3b

ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /srv

COPY pyproject.toml README.md LICENSE ./
COPY celery_durable celery_durable
RUN pip install ".[all]" flower
COPY examples examples

RUN useradd --system --uid 10001 durable
USER durable
CMD ["celery", "-A", "examples.order_approval", "worker", "-Q", "celery,durable", "--loglevel", "INFO"]
