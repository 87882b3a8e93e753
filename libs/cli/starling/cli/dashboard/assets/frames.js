// Work that waits for the next frames: each piece once, in turns of a few milliseconds, so that no input waits for all of it.

const BUDGET_MS = 6;
const waiting = new Map(); // by what it is for: the newest piece
let isAsked = false;

/** Do `piece` in one of the next frames, in place of an earlier one for the same `key`; an urgent one before others. */
export function later(key, piece, isUrgent = false) {
  if (isUrgent && waiting.size && !waiting.has(key)) {
    const others = [...waiting];
    waiting.clear();
    waiting.set(key, piece);
    for (const [other, its] of others) waiting.set(other, its);
  } else waiting.set(key, piece);
  ask();
}

/** Forget the piece for `key`. */
export function never(key) {
  waiting.delete(key);
}

function ask() {
  if (isAsked || !waiting.size) return;
  isAsked = true;
  requestAnimationFrame(turn);
}

function turn() {
  isAsked = false;
  const until = performance.now() + BUDGET_MS;
  // What the pieces ask for meanwhile has its turn in the next frame.
  for (const [key, piece] of [...waiting]) {
    if (waiting.get(key) !== piece) continue;
    waiting.delete(key);
    piece();
    if (performance.now() > until) break;
  }
  ask();
}
