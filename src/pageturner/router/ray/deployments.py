"""A Serve application from its settings: a deployment for each model, and the door before them.

Owns how our settings are told to Serve. Ray is imported here, when an application is built, and in
request_router.py.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

import pageturner
from pageturner.config.settings import RouterConfig
from pageturner.router.ray.door import Door
from pageturner.router.ray.replica import ModelReplica
from pageturner.router.ray.settings import AppSettings, ModelSettings

ROUTER = "pageturner.router.ray.request_router:PlacementRouter"
POLICY = "pageturner.router.autoscaling:GoodputPolicy"
STATS_SECONDS = 1.0  # between two reports of a replica to those who route
HEALTH_SECONDS, HEALTH_TIMEOUT = (
    5.0,
    30.0,
)  # three failures in a row, and Serve takes another replica
LOADS = 3  # times that a model is tried to be loaded before an application is given up
MANY = 100_000  # requests at a door: it bounds them itself


class ServeActor(ModelReplica):
    """A replica that ends when Serve deletes it."""

    async def __del__(self) -> None:
        await self.close()


def build(settings: AppSettings) -> Any:
    """The application, for `serve.run` or a Serve configuration."""
    from ray import serve

    router = settings.router_config
    models = {
        name: deployment_of(name, model, router).bind(model.tables(name))
        for name, model in settings.models.items()
    }
    door = serve.deployment(
        serve.ingress()(Door),
        name="door",
        num_replicas=settings.doors,
        max_ongoing_requests=MANY,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=router.shutdown_timeout,
        graceful_shutdown_wait_loop_s=0.5,
        max_surge_percent=100,
    )
    names = {name: sorted(model.adapters) for name, model in settings.models.items()}
    return _versioned(door, names, settings.router).bind(settings, models)


def deployment_of(name: str, model: ModelSettings, router: RouterConfig) -> Any:
    """The deployment of one model."""
    from ray import serve
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

    least, most = model.replicas
    fixed = {"num_replicas": least}
    scaled = {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=least,
            max_replicas=most,
            metrics_interval_s=1.0,
            look_back_period_s=5.0,
            upscale_delay_s=model.upscale_delay,
            downscale_delay_s=model.downscale_delay,
            policy=AutoscalingPolicy(policy_function=POLICY, policy_kwargs={"goal": model.goal}),
        )
    }
    patience = float(model.server.get("shutdown_timeout", router.shutdown_timeout))
    deployment = serve.deployment(
        ServeActor,
        name=name,
        max_ongoing_requests=model.max_open,
        ray_actor_options={"num_cpus": model.cpus, "num_gpus": model.gpus},
        request_router_config=RequestRouterConfig(
            request_router_class=ROUTER,
            request_router_kwargs={
                "deployment": name,
                "placement": router.placement,
                "prefix_chunks": router.prefix_chunks,
            },
            request_routing_stats_period_s=STATS_SECONDS,
            initial_backoff_s=0.01,
        ),
        health_check_period_s=HEALTH_SECONDS,
        health_check_timeout_s=HEALTH_TIMEOUT,
        graceful_shutdown_timeout_s=patience,
        graceful_shutdown_wait_loop_s=0.5,
        max_surge_percent=100,
        max_constructor_retry_count=LOADS,
        **(fixed if least == most else scaled),
    )
    return _versioned(deployment, model.tables(name), model.cpus, model.gpus)


def _versioned(deployment: Any, *what: Any) -> Any:
    """Return the deployment with a version that says what replicas are made of: then Serve replaces
    them when that has changed, and not whenever an application is started again, with another
    number of replicas for one."""
    made_of = msgspec.json.encode([pageturner.__version__, *what], order="sorted")
    # what anything else of Serve's has no name for; a test on a cluster holds it
    return deployment.options(version=hashlib.sha256(made_of).hexdigest()[:16], _internal=True)
