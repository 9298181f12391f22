// What the charts remember: the last minutes second by second, the last hour in steps. Both are bounded.

const FINE = { span: 300, step: 0.5, most: 700 };
const COARSE = { span: 3600, step: 10, most: 4000 };

/** The numbers of a status that are drawn over time. */
function point(status, doing) {
  const { time, stream, entropy, kept_share: kept, distance, probe } = status;
  return { time, stream, entropy, kept, distance, evidence: probe?.evidence ?? null, doing };
}

export class Recent {
  constructor() {
    this.rings = [FINE, COARSE].map((ring) => ({ ...ring, points: [] }));
  }

  /** Add a status. One that is not newer than the last is ignored, so that a history can be added twice. */
  add(status, doing) {
    const next = point(status, doing);
    for (const { points, step, span, most } of this.rings) {
      const last = points.at(-1);
      if (last && next.time <= last.time) continue;
      const same = last && last.stream === next.stream && Math.floor(last.time / step) === Math.floor(next.time / step);
      if (same) points[points.length - 1] = next;
      else points.push(next);
      points.splice(0, Math.max(points.findIndex((each) => each.time >= next.time - span), points.length - most));
    }
  }

  /** Return the last `span` seconds of a stream, or of all: points, begin and end, how far apart neighbours may be. */
  window(span, stream = "") {
    const { points, step } = this.rings.find((ring) => ring.span >= span) ?? this.rings.at(-1);
    const to = points.at(-1)?.time ?? Date.now() / 1000;
    const from = to - span;
    const shown = points.filter((each) => each.time >= from && (!stream || each.stream === stream));
    return { from, to, points: shown, gap: Math.max(8, 3 * step) };
  }
}
