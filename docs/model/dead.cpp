// M6: a message that failed too often moves from a channel's queue to the dead topic's, in one transaction. Two publish
// locks, two deliver locks, one commit word: that of the dead topic.
#include "mc.h"
#ifndef NS
#define NS 2
#endif
#ifndef NM // how many messages the publisher of the dead topic publishes itself
#define NM 1
#endif
#ifndef KILLS
#define KILLS 1
#endif
#ifndef LIMIT // failures after which a message is moved
#define LIMIT 1
#endif
#ifndef NOTED // 1: the dead topic notes the queue it takes from before the first store, and its repair resolves that
#define NOTED 1
#endif
#ifndef OWNWORD // 1: the source slot is decided by the dead topic's commit word; 0: freed after the copy is committed
#define OWNWORD 1
#endif
enum { FREE = 0, PREP, READY, INFL, REQUEUED, CONVICTED, MOV };
enum {
	SRC = 0,
	DEAD = 1,
	PS = 2,
	PD = 3
}; // locks: deliver locks of the two queues, publish locks of their topics
enum { MOVER = 0, PUB = 1, CS = 2, CD = 3, REAP = 4 };
enum { MSGS = 2 + NM };
struct R {
	i8 n;
	i8 a[NS];
};
static void push(R &r, int x)
{
	for (int i = 0; i < r.n; i++)
		if (r.a[i] == x)
			FAILX("slot pushed twice on one ring");
	if (r.n >= NS) {
		FAILX("ring overflow");
		return;
	}
	r.a[r.n++] = x;
}
static int pop(R &r)
{
	int x = r.a[0];
	for (int i = 1; i < r.n; i++)
		r.a[i - 1] = r.a[i];
	r.n--;
	r.a[r.n] = 0;
	return x;
}
struct Q {
	i8 dirty;
	i8 st[NS], msg[NS], seq[NS], fails[NS];
	R ready, back, wait,
			fr; // wait: the deferred heap, where a convicted message waits for the mover
};
struct Md {
	enum { NP = 5 };
	struct S {
		Pr pr[5];
		i8 kills, lk[4], bad[4], committed[2], moving, nmsg, orphan;
		i8 ret[MSGS + 1], fin[MSGS + 1];
		Q q[2];
	};
	static const char *name(int i)
	{
		static const char *n[] = {"move", "pub", "cons", "dead", "reap"};
		return n[i];
	}
	static void init(S &s)
	{
		s.kills = KILLS;
		for (int i = 0; i < 5; i++)
			s.pr[i].alive = 1;
		for (int i = 0; i < NS; i++)
			push(s.q[DEAD].fr, i);
		for (int i = 0; i < 2; i++) {
			Q &q = s.q[SRC];
			q.st[i] = READY;
			q.msg[i] = q.seq[i] = i + 1;
			push(q.ready, i);
			s.ret[i + 1] = 1;
		}
		for (int i = 2; i < NS; i++)
			push(s.q[SRC].fr, i);
		s.committed[SRC] = 2;
	}
	static bool kill(S &s, int i)
	{
		Pr &p = s.pr[i];
		if (i == REAP || !p.pc[0])
			return false;
		for (int l = 0; l < 4; l++)
			if (s.lk[l] == i + 1) {
				s.lk[l] = 0;
				s.bad[l] = 1;
			}
		memset(&p, 0, sizeof p);
		p.alive = 1;
		if (i == CS)
			s.orphan = 1;
		return true;
	}
	// Both locks of queue k are held. A slot of the source that is being moved is decided by the dead topic's word.
	static int rebuild(S &s, int k, int me, int d)
	{
		Pr &p = s.pr[me];
		Q &q = s.q[k];
		BEGIN(d)
		for (p.v[8] = 0; p.v[8] < NS; p.v[8]++) {
			if (q.st[p.v[8]] == PREP)
				ST(q.st[p.v[8]] = q.seq[p.v[8]] <= s.committed[k] ? READY : FREE);
			if (q.st[p.v[8]] == MOV)
				ST(q.st[p.v[8]] = OWNWORD && q.seq[p.v[8]] <= s.committed[DEAD] ? FREE : CONVICTED);
		}
		p.v[8] = 0;
		ST({
			memset(&q.ready, 0, sizeof(R));
			memset(&q.back, 0, sizeof(R));
			memset(&q.wait, 0, sizeof(R));
			memset(&q.fr, 0, sizeof(R));
			for (int i = 0; i < NS; i++) {
				if (q.st[i] == FREE) {
					q.msg[i] = q.seq[i] = q.fails[i] = 0;
					push(q.fr, i);
				}
				if (q.st[i] == REQUEUED)
					push(q.back, i);
				if (q.st[i] == CONVICTED)
					push(q.wait, i);
			}
			for (int z = 1; z < 20; z++)
				for (int i = 0; i < NS; i++)
					if (q.seq[i] == z && q.st[i] == READY)
						push(q.ready, i);
		});
		ST(q.dirty = 0);
		END
	}
	// The publish lock of topic t was left by a death.
	static int recoverP(S &s, int t, int me, int d)
	{
		Pr &p = s.pr[me];
		BEGIN(d) LOCK(t);
		CALL(rebuild(s, t, me, D_ + 1));
		ST(s.bad[t] = 0);
		UNLOCK(t);
		if (NOTED && t == DEAD && s.moving) {
			LOCK(SRC);
			ST(s.q[SRC].dirty = 1); // the rings are rebuilt by the next locker of the source
			if (s.bad[SRC])
				ST(s.bad[SRC] = 0);
			for (p.v[9] = 0; p.v[9] < NS; p.v[9]++)
				if (s.q[SRC].st[p.v[9]] == MOV)
					ST(s.q[SRC].st[p.v[9]] = s.q[SRC].seq[p.v[9]] <= s.committed[DEAD] ? FREE
					                                                                   : CONVICTED);
			p.v[9] = 0;
			UNLOCK(SRC);
			ST(s.moving = 0);
		}
		ST(s.bad[PS + t] = 0);
		END
	}
	static int lockP(S &s, int t, int me, int d)
	{
		Pr &p = s.pr[me];
		BEGIN(d) LOCK(PS + t);
		if (s.bad[PS + t])
			CALL(recoverP(s, t, me, D_ + 1));
		END
	}
	static int lockD(S &s, int k, int me, int d)
	{
		Pr &p = s.pr[me];
		Q &q = s.q[k];
		BEGIN(d)
		for (;;) {
			LOCK(k);
			if (!s.bad[k] && !q.dirty)
				RET;
			if (s.bad[k]) {
				ST(q.dirty = 1);
				ST(s.bad[k] = 0);
			}
			UNLOCK(k);
			LOCK(PS + k);
			if (s.bad[PS + k])
				CALL(recoverP(s, k, me, D_ + 1));
			LOCK(k);
			if (s.bad[k] || q.dirty) {
				CALL(rebuild(s, k, me, D_ + 1));
				ST(s.bad[k] = 0);
			}
			UNLOCK(k);
			UNLOCK(PS + k);
		}
		END
	}
#define X p.v[2]
#define Y p.v[3]
	static int mover(S &s, int me)
	{
		Pr &p = s.pr[me];
		Q &q = s.q[SRC], &to = s.q[DEAD];
		BEGIN(0)
		for (;;) {
			WAITFOR(q.wait.n && to.fr.n || q.dirty || s.bad[SRC] || s.bad[PD] || s.bad[PS]);
			memset(p.v, 0, sizeof p.v);
			if (s.bad[PS]) {
				CALL(lockP(s, SRC, me, 1));
				UNLOCK(PS);
			}
			CALL(lockP(s, DEAD, me, 1));
			LOCK(SRC);
			if (s.bad[SRC] || q.dirty) {
				if (s.bad[SRC]) {
					ST(q.dirty = 1);
					ST(s.bad[SRC] = 0);
				}
				UNLOCK(SRC);
				UNLOCK(PD);
				CALL(lockD(s, SRC, me, 1));
				UNLOCK(SRC);
				continue;
			}
			if (!q.wait.n || !to.fr.n) {
				UNLOCK(SRC);
				UNLOCK(PD);
				continue;
			}
			ST(s.moving = 1);
			X = q.wait.a[0];
			Y = to.fr.a[0];
			ST(q.seq[X] = s.committed[DEAD] + 1; q.st[X] = MOV);
			ST(pop(q.wait));
			ST(to.msg[Y] = q.msg[X]; to.seq[Y] = s.committed[DEAD] + 1; to.st[Y] = PREP);
			ST(pop(to.fr));
			ST(s.committed[DEAD]++);
			ST(to.st[Y] = READY);
			ST(push(to.ready, Y));
			ST(q.st[X] = FREE);
			ST(push(q.fr, X));
			UNLOCK(SRC);
			ST(s.moving = 0);
			UNLOCK(PD);
		}
		END
	}
	static int pub(S &s, int me)
	{
		Pr &p = s.pr[me];
		Q &to = s.q[DEAD];
		BEGIN(0)
		while (s.nmsg < NM) {
			WAITFOR(to.fr.n || s.bad[PD]);
			CALL(lockP(s, DEAD, me, 1));
			if (!to.fr.n) {
				UNLOCK(PD);
				continue;
			}
			ST(s.nmsg++; p.v[4] = 2 + s.nmsg);
			Y = to.fr.a[0];
			ST(to.msg[Y] = p.v[4]; to.seq[Y] = s.committed[DEAD] + 1; to.st[Y] = PREP);
			ST(pop(to.fr));
			ST(s.committed[DEAD]++);
			ST(to.st[Y] = READY);
			ST(push(to.ready, Y));
			UNLOCK(PD, s.ret[p.v[4]] = 1; Y = p.v[4] = 0);
		}
		WAITFOR(false);
		END
	}
	// Takes a message of the source and fails it. The last failure convicts it: it waits for the mover.
	static int cons(S &s, int me)
	{
		Pr &p = s.pr[me];
		Q &q = s.q[SRC];
		BEGIN(0)
		for (;;) {
			WAITFOR(q.ready.n || q.back.n || q.dirty || s.bad[SRC]);
			CALL(lockD(s, SRC, me, 1));
			if (!q.ready.n && !q.back.n) {
				UNLOCK(SRC);
				continue;
			}
			p.v[5] = q.back.n > 0;
			X = p.v[5] ? q.back.a[0] : q.ready.a[0];
			ST(q.st[X] = INFL);
			ST(pop(p.v[5] ? q.back : q.ready));
			UNLOCK(SRC);
			CALL(lockD(s, SRC, me, 1));
			if (q.st[X] == INFL) {
				if (s.fin[q.msg[X]])
					FAILX("delivered by the source after it was finished at the dead topic");
				ST(q.fails[X]++; q.st[X] = q.fails[X] >= LIMIT ? CONVICTED : REQUEUED);
				ST(push(q.fails[X] >= LIMIT ? q.wait : q.back, X));
			}
			UNLOCK(SRC);
			X = p.v[5] = 0;
		}
		END
	}
	static int dead(S &s, int me)
	{
		Pr &p = s.pr[me];
		Q &q = s.q[DEAD];
		BEGIN(0)
		for (;;) {
			WAITFOR(q.ready.n || q.dirty || s.bad[DEAD]);
			CALL(lockD(s, DEAD, me, 1));
			if (q.ready.n) {
				X = q.ready.a[0];
				p.v[4] = q.msg[X];
				ST(pop(q.ready));
				NOTE("DELIVER m%d;", p.v[4]);
				if (s.fin[p.v[4]])
					FAILX("the dead topic delivered a message twice");
				ST(q.st[X] = FREE; s.fin[p.v[4]] = 1);
				ST(push(q.fr, X));
			}
			UNLOCK(DEAD);
			X = p.v[4] = 0;
		}
		END
	}
	// Gives back the messages in flight of a consumer that died; it is the next life's process that holds none.
	static int reap(S &s, int me)
	{
		Pr &p = s.pr[me];
		Q &q = s.q[SRC];
		BEGIN(0)
		for (;;) {
			WAITFOR(s.orphan && !s.pr[CS].pc[0]);
			CALL(lockD(s, SRC, me, 1));
			for (X = 0; X < NS; X++)
				if (q.st[X] == INFL && !s.pr[CS].pc[0]) {
					ST(q.fails[X]++; q.st[X] = q.fails[X] >= LIMIT ? CONVICTED : REQUEUED);
					ST(push(q.fails[X] >= LIMIT ? q.wait : q.back, X));
				}
			X = 0;
			UNLOCK(SRC, s.orphan = 0);
		}
		END
	}
	static int step(S &s, int i)
	{
		switch (i) {
		case MOVER:
			return mover(s, i);
		case PUB:
			return pub(s, i);
		case CS:
			return s.orphan ? BLOCK : cons(s, i); // the next consumer comes when the reaper is done
		case CD:
			return dead(s, i);
		default:
			return reap(s, i);
		}
	}
	static void inv(S &s)
	{
		for (int m = 1; m <= 2; m++) {
			int live = 0;
			for (int k = 0; k < 2; k++)
				for (int i = 0; i < NS; i++)
					if (s.q[k].msg[i] == m && s.q[k].st[i] != FREE) {
						bool decided = s.q[k].st[i] != PREP || s.q[k].seq[i] <= s.committed[k];
						bool moved = s.q[k].st[i] == MOV && s.q[k].seq[i] <= s.committed[DEAD];
						live += decided && !moved;
					}
			if (live > 1)
				FAILX("a message is in both queues");
			if (!live && !s.fin[m])
				FAILX("LOST");
		}
	}
	static void terminal(S &s)
	{
		for (int l = 0; l < 4; l++)
			if (s.lk[l] || s.bad[l])
				FAILX("deadlock, or a lock is left");
		if (s.nmsg < NM)
			FAILX("publisher stuck");
		for (int m = 1; m <= MSGS; m++)
			if (s.ret[m] && !s.fin[m])
				FAILX("LOST");
		for (int k = 0; k < 2; k++)
			if (s.q[k].fr.n != NS)
				FAILX("slot leaked");
	}
	static void dump(S &s)
	{
		printf("  end: committed=%d,%d moving=%d\n", s.committed[0], s.committed[1], s.moving);
		for (int k = 0; k < 2; k++)
			for (int i = 0; i < NS; i++)
				printf("   q%d slot%d st=%d msg=%d seq=%d fails=%d\n", k, i, s.q[k].st[i],
				       s.q[k].msg[i], s.q[k].seq[i], s.q[k].fails[i]);
	}
};
int main()
{
	char t[300];
	snprintf(t, 300, "M6 NS=%d NM=%d KILLS=%d LIMIT=%d NOTED=%d OWNWORD=%d", NS, NM, KILLS, LIMIT,
	         NOTED, OWNWORD);
	return mc<Md>(t);
}
