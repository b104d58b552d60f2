// M8: a consumer of two queues, X, beside a consumer of the second queue alone, Y. X leaves its bits in the bitmaps of
// the queues that it found empty, also while it is awake. A waker leaves a hint which queue it was; it counts X as woken
// only if X sleeps. A state is terminal if nobody can move before the timer of one second.
#include "mc.h"
#ifndef KILLS
#define KILLS 0
#endif
#ifndef COUNT // 0: a waker counts X as woken although it is busy elsewhere
#define COUNT 1
#endif
#ifndef OWED // 0: X, rung for one queue, takes from the other and wakes nobody in its place
#define OWED 1
#endif
#ifndef HINTS // 0: X falls asleep without a look at its hints
#define HINTS 1
#endif
#ifndef ALARM // 0: the reaper rings, and leaves no hints
#define ALARM 1
#endif
#ifndef BUSY // 1: a consumer takes one message and stops
#define BUSY 1
#endif
struct Md {
	enum { NP = 5, AWAKE = 0, ASLEEP = 1 };
	struct S {
		Pr pr[5];
		i8 kills, n[2], bx[2], by, hint[2], act[2], turn, owed, sem[2], slp[2], has[2], dead;
	};
	static const char *name(int i)
	{
		static const char *n[] = {"pubA", "pubB", "X", "Y", "reap"};
		return n[i];
	}
	static void init(S &s)
	{
		s.kills = KILLS;
		s.act[0] = s.act[1] = 1;
		for (int i = 0; i < 5; i++)
			s.pr[i].alive = 1;
	}
	static bool kill(S &s, int i)
	{
		if (i > 3 || !s.pr[i].alive)
			return false;
		memset(&s.pr[i], 0, sizeof(Pr));
		s.dead |= 1 << i;
		if (i == 2)
			s.slp[0] = 0;
		if (i == 3)
			s.slp[1] = 0;
		return true;
	}
	// One wake-up for queue q; v[5] says whom it picked.
	static int wake(S &s, int me, int q)
	{
		Pr &p = s.pr[me];
		BEGIN(1)
		for (;;) {
			ST(int y = q == 1 && s.by, first = choose(2); p.v[5] = s.bx[q] && (first || !y) ? 1
			                                                       : y                      ? 2
			                                                                                : 0;
			   if (p.v[5] == 1) s.bx[q] = 0; if (p.v[5] == 2) s.by = 0);
			if (!p.v[5])
				RET;
			if (p.v[5] == 2) {
				ST(s.sem[1]++);
				RET;
			}
			ST(s.hint[q] = 1);
			ST(p.v[6] = s.turn == ASLEEP; s.turn = AWAKE);
			if (p.v[6])
				ST(s.sem[0]++);
			if (p.v[6] || !COUNT)
				RET;
		}
		END
	}
	static int pub(S &s, int me)
	{
		Pr &p = s.pr[me];
		BEGIN(0)
		ST(s.n[me]++);
		CALL(wake(s, me, me));
		WAITFOR(false);
		END
	}
	static int x(S &s, int me)
	{
		Pr &p = s.pr[me];
		BEGIN(0)
		for (;;) {
			for (p.v[0] = 0; p.v[0] < 2; p.v[0]++)
				ST(s.act[p.v[0]] |= s.hint[p.v[0]]; s.hint[p.v[0]] = 0);
			ST(p.v[1] = choose(2)); // the policy: any order
			p.v[3] = 0;
			for (p.v[0] = 0; p.v[0] < 2 && !p.v[3]; p.v[0]++) {
				p.v[2] = p.v[0] ^ p.v[1];
				if (!s.act[p.v[2]])
					continue;
				ST(if (s.n[p.v[2]] > 0) {
					s.n[p.v[2]]--;
					s.has[p.v[2]]++;
					p.v[3] = 1;
				});
				if (p.v[3])
					break;
				ST(s.bx[p.v[2]] = 1);
				ST(if (!s.n[p.v[2]]) s.act[p.v[2]] = 0);
			}
			if (p.v[3]) {
				STEP;
				if (s.n[p.v[2]] > 0)
					CALL(wake(s, me, p.v[2]));
				p.v[4] = 1 - p.v[2];
				STEP;
				if (OWED && s.owed && s.act[p.v[4]] && s.n[p.v[4]] > 0)
					CALL(wake(s, me, p.v[4]));
				s.owed = 0;
				if (BUSY)
					break;
				continue;
			}
			if (s.act[0] || s.act[1])
				continue;
			ST(s.turn = ASLEEP);
			STEP;
			if (!HINTS || (!s.hint[0] && !s.hint[1])) {
				ST(s.slp[0] = 1);
				WAITFOR(s.sem[0]);
				s.sem[0]--;
				s.slp[0] = 0;
			}
			ST(s.owed |= s.turn == AWAKE; s.turn = AWAKE);
		}
		WAITFOR(false);
		END
	}
	static int y(S &s, int me)
	{
		Pr &p = s.pr[me];
		BEGIN(0)
		for (;;) {
			ST(s.by = 1);
			STEP;
			if (!s.n[1]) {
				ST(s.slp[1] = 1);
				WAITFOR(s.sem[1]);
				s.sem[1]--;
				s.slp[1] = 0;
			}
			ST(s.by = 0);
			p.v[3] = 0;
			ST(if (s.n[1] > 0) {
				s.n[1]--;
				p.v[3] = 1;
			});
			if (p.v[3]) {
				STEP;
				if (s.n[1] > 0)
					CALL(wake(s, me, 1));
				if (BUSY)
					break;
			}
		}
		WAITFOR(false);
		END
	}
	static int reap(S &s, int me)
	{
		Pr &p = s.pr[me];
		BEGIN(0)
		for (;;) {
			WAITFOR(s.dead);
			p.v[0] = s.dead;
			ST(s.dead &= ~p.v[0]; if (p.v[0] & 4) {
				s.bx[0] = s.bx[1] = 0;
				s.n[0] += s.has[0];
				s.n[1] += s.has[1];
				s.has[0] = s.has[1] = 0;
			} if (p.v[0] & 8) s.by = 0);
			if (ALARM)
				ST(s.hint[0] = s.hint[1] = 1);
			ST(s.turn = AWAKE);
			ST(s.sem[0]++);
			ST(s.sem[1]++);
		}
		END
	}
	static int step(S &s, int i)
	{
		if (!s.pr[i].alive)
			return BLOCK;
		return i < 2 ? pub(s, i) : i == 2 ? x(s, i) : i == 3 ? y(s, i) : reap(s, i);
	}
	static void inv(S &)
	{
	}
	static void terminal(S &s)
	{
		if ((s.n[0] || s.n[1]) && s.slp[0])
			FAILX("message waits for the 1 s re-check while the consumer of both queues sleeps");
		if (s.n[1] && s.slp[1])
			FAILX("message waits for the 1 s re-check while the consumer of its queue sleeps");
	}
	static void dump(S &s)
	{
		printf("  n=%d,%d sem=%d,%d X bits=%d,%d hints=%d,%d active=%d,%d turn=%d Y bit=%d "
		       "asleep=%d,%d\n",
		       s.n[0], s.n[1], s.sem[0], s.sem[1], s.bx[0], s.bx[1], s.hint[0], s.hint[1], s.act[0],
		       s.act[1], s.turn, s.by, s.slp[0], s.slp[1]);
	}
};
int main()
{
	char t[200];
	snprintf(t, 200, "M8 COUNT=%d OWED=%d HINTS=%d ALARM=%d BUSY=%d KILLS=%d", COUNT, OWED, HINTS,
	         ALARM, BUSY, KILLS);
	return mc<Md>(t);
}
