"""Celery on shared memory: a transport of kombu and a result backend, with the extra `celery`.

    from celery import Celery

    app = Celery("jobs", broker="shmq://jobs", backend="shmq://jobs")

`jobs` is the name of a running instance (`shmq serve --instance jobs`). docs/celery.md has the
settings and what differs from other brokers.

kombu and Celery find both by entry points of the package. Where those are not installed, import
`shmq.integrations.celery.alias`, or set `broker_transport` and `result_backend` to the full names
`shmq.integrations.celery.transport:Transport` and `shmq.integrations.celery.backend:Backend`.
"""
