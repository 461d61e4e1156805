"""Reinforcement learning on a setup: every part is made, and the loop runs with what watches it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from posttrain.build.algorithm import make_audit, make_plan
from posttrain.build.cluster import stage_learner
from posttrain.build.declared_ways import Ways, declared
from posttrain.build.rendered_prompts import rendered_prompts
from posttrain.build.sampler import flowing, make_sampler, until_done
from posttrain.build.setup import Setup
from posttrain.pipelines import rl
from posttrain.pipelines.clock import Clock
from posttrain.runs import Ledger, rollout_writer
from posttrain.stages.guards import guard_learner
from posttrain.stages.open_stage import OpenStage
from posttrain.stages.rl_resume import drop_replies, kept_replies, lag_of, resume_rl
from posttrain.stages.rl_source import announced, checked, make_source
from posttrain.stages.rl_watch import Watch
from posttrain.track.progress import phase


def learn(setup: Setup, stage: OpenStage) -> None:
    """Take the steps of ``[rl]`` that are not taken yet, and save the model.

    An engine that was handed over stays open behind it.
    """
    recipe, policy, keeper, seen = setup.recipe, setup.policy, stage.keeper, stage.seen
    section = recipe.rl
    with until_done(make_sampler(setup), given=setup.engine) as engine:
        prompts = rendered_prompts(setup, "train", max_new_tokens=section.max_new_tokens)
        total_steps = section.steps * section.epochs * section.minibatches
        learner = stage_learner(setup, "rl", total_steps=total_steps)
        sync = engine.sync(learner)
        plan = replace(make_plan(section), recorded_tokens=recipe.run.token_numbers)
        longest = section.max_new_tokens + max((len(p.tokens) for p in prompts), default=0)
        ways = Ways(keeper, partial(declared, setup, learner, longest=longest, engine=engine))
        replies = None if setup.env is None else kept_replies(keeper, stage.folder.path)
        seen_by = seen.setup(setup), seen.engine(engine)
        source = make_source(*seen_by, prompts=prompts, replies=replies)
        state, waiting = resume_rl(
            keeper, learner, source=source, prompts=prompts, sync=sync, lag=lag_of(section)
        )
        if section.ahead:
            _ = learner.micro_batch_tokens  # is tried now, before another thread takes memory
        # Batches are wrapped, innermost first: sample, refuse those with too many broken scores,
        # note down, run ahead, show progress, time.
        ledger = Ledger(stage.folder.path, step=keeper.step, waiting=waiting)
        batches = source.steps(section.steps - keeper.step - len(waiting))
        batches = ledger.noted(checked(batches, section.max_invalid))
        device = policy.model.device
        flow_of = flowing(batches, sync, ahead=section.ahead, device=device, waiting=waiting)
        learner = seen.learner(learner)
        guarded = guard_learner(learner, section, keeper=keeper, decode=setup.template.decode)
        clock, writing = Clock(), rollout_writer(stage.folder.rollouts)
        with keeper.stepping(), ledger, flow_of as given, writing as writer:
            flow = seen.flow(given)
            watch = Watch(
                setup=setup,
                stage=stage,
                engine=seen.engine(engine),
                learner=guarded,
                flow=flow,
                prompts=prompts,
                order=source.prompts.state,
                writer=writer,
                ledger=ledger,
                audit=make_audit(recipe, section, plan=plan, device=setup.device),
                seconds=clock.seconds,
                ways=ways,
                done=partial(drop_replies, replies, stage=stage.folder),
            )
            if section.evaluate_every and not keeper.step:
                stage.tracker.log(0, watch.evaluate())
            rl.train(
                stage.callbacks.until_ended(clock.source(announced(flow.batches, setup))),
                guarded,
                plan=plan,
                sync=clock.sync(flow.sync),
                pad_token=policy.pad_token,
                seed=recipe.run.seed,
                on_step=seen.on_step(watch.on_step),
                state=state,
            )
        with phase("saving the model"):
            learner.save(stage.folder.model)
