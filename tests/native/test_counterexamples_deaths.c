/* The counterexamples of docs/model: locks, deaths, and slots that are used again. */
#include "counterexample.h"

static void only_a_holder_of_the_deliver_lock_pushes_free_slots(void)
{
	stage *x = setup();
	shmq_loan *loan;
	pid_t pid;

	EQUAL(shmq_loan_begin(x->p, 1, soon(), &loan), 0);
	pid = stopped(x, false);
	EQUAL(shmq_loan_cancel(loan, 0), SHMQ_AGAIN);
	go_on(pid);
	pid = stopped(x, true);
	EQUAL(shmq_loan_cancel(loan, 0), 0);
	go_on(pid);
	shmq_loan_free(loan);
	EQUAL(ring_count(&x->q->free_head, &x->q->free_tail), ld(&x->q->slots_committed));
	teardown(x);
}

static void lend_and_die(stage *x)
{
	shmq_loan *loan;

	EQUAL(shmq_loan_begin(x->p, 1, soon(), &loan), 0);
	EQUAL(lock_take(&x->b->topics[x->topic].publish, 0), 0);
}

/* The rebuild after its owner's death keeps the loan; the reaper frees it. */
static void a_dead_ones_loan_is_freed_by_the_reaper(void)
{
	stage *x = setup();
	uint32_t returned;

	a_death(x, lend_and_die);
	publish(x, "a");
	EQUAL(ring_count(&x->q->free_head, &x->q->free_tail), ld(&x->q->slots_committed) - 2);
	SOUND(x->w);
	EQUAL(world_reap(x->w, x->s, &returned), 1);
	EQUAL(ring_count(&x->q->free_head, &x->q->free_tail), ld(&x->q->slots_committed) - 1);
	expect(x, "a");
	teardown(x);
}

static void take_pin_and_finish(stage *x)
{
	shmq_message m = take(x);

	EQUAL(shmq_pin(x->c, &m, soon()), 0);
	EQUAL(shmq_finish(x->c, &m, 1, NULL, soon()), 0);
}

static void take_pin_finish_and_die_with_the_lock(stage *x)
{
	take_pin_and_finish(x);
	hold_the_deliver_lock(x);
}

static void finished_and_pinned_is_neither_free_nor_in_flight(void)
{
	stage *x = setup();
	shmq_message m;
	uint32_t returned;

	publish(x, "abc");
	m = take(x);
	EQUAL(shmq_pin(x->c, &m, soon()), 0);
	EQUAL(shmq_finish(x->c, &m, 1, NULL, soon()), 0);
	a_death(x, take_pin_finish_and_die_with_the_lock); /* b */
	EQUAL(world_reap(x->w, x->s, &returned), 1);
	EQUAL(returned, 0); /* finished is finished, the reaper does not bring it back */
	rebuild(x);
	for (int i = 0; i < 150; i++) {
		publish(x, "-");
		CHECK(body_is(&m, "a"));
	}
	expect(x, "c");
	for (int i = 0; i < 150; i++)
		expect(x, "-");
	EQUAL(shmq_unpin(x->c, &m, soon()), 0);
	EQUAL(ring_count(&x->q->free_head, &x->q->free_tail), ld(&x->q->slots_committed));
	teardown(x);
}

static void hold_both_locks(stage *x)
{
	EQUAL(lock_take(&x->b->topics[x->topic].publish, 0), 0);
	hold_the_deliver_lock(x);
}

static void who_cannot_finish_a_repair_leaves_the_lock_usable(void)
{
	stage *x = setup();
	uint64_t serial, id;
	shmq_body body = {"b", 1};
	shmq_broker *late;
	shmq_producer *p;
	uint32_t returned;

	(void)world_queue(x->w, x->topic, "d", &serial);
	publish(x, "a");
	a_death(x, hold_both_locks);
	late = world_attach(x->w, SHMQ_AS_CLIENT);
	EQUAL(shmq_producer_open(late, x->topic, x->generation, &p), 0);
	EQUAL(shmq_publish(p, &body, 1, 0, soon(), &id), SHMQ_NEED_MAP); /* cannot repair yet */
	EQUAL(ld(&late->topics[x->topic].dirty), 1);
	EQUAL(lock_take(&late->topics[x->topic].publish, 0), 0); /* and is in nobody's way */
	lock_drop(&late->topics[x->topic].publish);
	EQUAL(MAPPED(x->w, late, shmq_publish(p, &body, 1, 0, soon(), &id)), 0);
	EQUAL(ld(&late->topics[x->topic].dirty), 0);
	EQUAL(MAPPED(x->w, x->s, shmq_rebuild(x->s, 1, soon())), 0);
	EQUAL(world_reap(x->w, x->s, &returned), 1);
	expect(x, "ab");
	shmq_producer_close(p);
	EQUAL(shmq_broker_detach(late, soon()), 0);
	shmq_broker_close(late);
	teardown(x);
}

/* The holder of the deliver lock died, and the publish lock is held: the repair waits for it and
 * does not start under the deliver lock alone. */
static void a_queue_is_never_repaired_under_its_deliver_lock_alone(void)
{
	stage *x = setup();
	shmq_message m;
	uint32_t got, returned;
	pid_t pid;

	publish(x, "ab");
	a_death(x, hold_the_deliver_lock);
	pid = stopped(x, true);
	EQUAL(shmq_take(x->c, &m, 1, 0, &got), SHMQ_AGAIN);
	EQUAL(ld(&x->q->dirty), 1);
	go_on(pid);
	expect(x, "ab");
	EQUAL(ld(&x->q->dirty), 0);
	EQUAL(world_reap(x->w, x->s, &returned), 1);
	teardown(x);
}

static void take_three(stage *x)
{
	for (int i = 0; i < 3; i++)
		(void)take(x);
}

static void a_dead_ones_entry_is_freed_last(void)
{
	stage *x = setup();
	shmq_client_desc *entry;
	shmq_dead dead[2];
	uint32_t found, returned;
	pid_t pid;

	publish(x, "abcd");
	a_death(x, take_three);
	EQUAL(shmq_reap_scan(x->s, dead, 2, &found), 0);
	EQUAL(found, 1);
	entry = &x->b->clients[dead[0].client];
	pid = stopped(x, false);
	EQUAL(shmq_reap(x->s, dead[0].client, dead[0].generation, 0, &returned), SHMQ_AGAIN);
	EQUAL(ld(&entry->state), SHMQ_CLIENT_LIVE); /* its messages are still to be found by it */
	EQUAL(ld(&entry->generation), dead[0].generation);
	EQUAL(shmq_reap_scan(x->s, dead, 2, &found), 0);
	EQUAL(found, 1);
	go_on(pid);
	EQUAL(shmq_reap(x->s, dead[0].client, dead[0].generation, soon(), &returned), 0);
	EQUAL(returned, 3);
	EQUAL(ld(&entry->state), SHMQ_CLIENT_FREE);
	EQUAL(shmq_reap(x->s, dead[0].client, dead[0].generation, soon(), &returned), SHMQ_GONE);
	expect(x, "abcd");
	teardown(x);
}

static void a_slot_used_again_is_not_taken_for_the_message_that_was_in_it(void)
{
	stage *x = setup();
	shmq_consumer *other = world_consumer(x->w, x->b, x->queue, x->serial, 10);
	shmq_message old, m;
	uint32_t expired, due, got;

	publish(x, "a");
	old = take(x);
	EQUAL(old.attempts, 1);
	EQUAL(shmq_expire(x->s, x->queue,
	                  &(shmq_expiry){.now = shmq_now() + 100 * NS_PER_S, .limit = 10}, soon(),
	                  &expired, &due),
	      0);
	EQUAL(shmq_take(other, &m, 1, soon(), &got), 0);
	EQUAL(shmq_finish(other, &m, 1, NULL, soon()), 0);
	do { /* until the same slot comes again, with the same owner and the same attempts */
		publish(x, "b");
		m = take(x);
		if (m.slot != old.slot)
			EQUAL(shmq_finish(x->c, &m, 1, NULL, soon()), 0);
	} while (m.slot != old.slot);
	EQUAL(m.attempts, old.attempts);
	EQUAL(SHMQ_OWNER_OF(m.word), SHMQ_OWNER_OF(old.word));
	CHECK(!shmq_message_is_ours(x->c, &old));
	CHECK(shmq_message_is_ours(x->c, &m));
	EQUAL(shmq_finish(x->c, &old, 1, NULL, soon()), SHMQ_NOT_IN_FLIGHT);
	rebuild(x); /* does not lower a generation either */
	CHECK(!shmq_message_is_ours(x->c, &old));
	EQUAL(shmq_finish(x->c, &m, 1, NULL, soon()), 0);
	EQUAL(shmq_consumer_close(other, soon()), 0);
	shmq_consumer_free(other);
	teardown(x);
}

int main(void)
{
	only_a_holder_of_the_deliver_lock_pushes_free_slots();
	a_dead_ones_loan_is_freed_by_the_reaper();
	finished_and_pinned_is_neither_free_nor_in_flight();
	who_cannot_finish_a_repair_leaves_the_lock_usable();
	a_queue_is_never_repaired_under_its_deliver_lock_alone();
	a_dead_ones_entry_is_freed_last();
	a_slot_used_again_is_not_taken_for_the_message_that_was_in_it();
	return 0;
}
