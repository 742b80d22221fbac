"""Actors: processes that step environments beside the process that learns, here or on Ray.

    learner process                          actor process (one or several)
    OffPolicyLoop -> ActorPool  <-  steps    <-  EnvActor: Collector(environment, policy)
                     ActorPool  ->  weights, commands, steps that are allowed  ->

`ActorPool` has the interface of `training.collector.Collector`, so the training loop is the same.
What carries steps, weights and commands is a `Transport`: `Processes` or `RayCluster`.
"""
