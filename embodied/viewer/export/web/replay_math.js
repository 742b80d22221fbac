// Matrices are column by column, 16 numbers; quaternions w, x, y, z.
const V = {
  sub: (a, b) => [a[0] - b[0], a[1] - b[1], a[2] - b[2]],
  add: (a, b) => [a[0] + b[0], a[1] + b[1], a[2] + b[2]],
  by: (a, s) => [a[0] * s, a[1] * s, a[2] * s],
  dot: (a, b) => a[0] * b[0] + a[1] * b[1] + a[2] * b[2],
  cross: (a, b) => [a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]],
  size: (a) => Math.hypot(a[0], a[1], a[2]),
  unit: (a) => V.by(a, 1 / (V.size(a) || 1)),
};

const M = {
  times(a, b) {
    const out = new Float32Array(16);
    for (let c = 0; c < 4; c++)
      for (let r = 0; r < 4; r++) {
        let sum = 0;
        for (let k = 0; k < 4; k++) sum += a[k * 4 + r] * b[c * 4 + k];
        out[c * 4 + r] = sum;
      }
    return out;
  },
  pose(p, q) {
    const [w, x, y, z] = q;
    return new Float32Array([
      1 - 2 * (y * y + z * z), 2 * (x * y + w * z), 2 * (x * z - w * y), 0,
      2 * (x * y - w * z), 1 - 2 * (x * x + z * z), 2 * (y * z + w * x), 0,
      2 * (x * z + w * y), 2 * (y * z - w * x), 1 - 2 * (x * x + y * y), 0,
      p[0], p[1], p[2], 1,
    ]);
  },
  look(eye, target, up) {
    const z = V.unit(V.sub(eye, target)), x = V.unit(V.cross(up, z)), y = V.cross(z, x);
    return new Float32Array([
      x[0], y[0], z[0], 0, x[1], y[1], z[1], 0, x[2], y[2], z[2], 0,
      -V.dot(x, eye), -V.dot(y, eye), -V.dot(z, eye), 1,
    ]);
  },
  perspective(fov, aspect, near, far) {
    const f = 1 / Math.tan(fov / 2), d = near - far;
    return new Float32Array([f / aspect, 0, 0, 0, 0, f, 0, 0, 0, 0, (far + near) / d, -1, 0, 0, 2 * far * near / d, 0]);
  },
  box(half, near, far) {
    const d = far - near;
    return new Float32Array([1 / half, 0, 0, 0, 0, 1 / half, 0, 0, 0, 0, -2 / d, 0, 0, 0, -(far + near) / d, 1]);
  },
};

// Between two poses of 7 numbers each (place, turn): `share` of the way.
function between(poses, a, b, share) {
  const place = [0, 1, 2].map((i) => poses[a + i] + (poses[b + i] - poses[a + i]) * share);
  let dot = 0;
  for (let i = 3; i < 7; i++) dot += poses[a + i] * poses[b + i];
  const sign = dot < 0 ? -1 : 1, turn = [];
  for (let i = 3; i < 7; i++) turn.push(poses[a + i] * (1 - share) + sign * poses[b + i] * share);
  const size = Math.hypot(...turn) || 1;
  return [place, turn.map((value) => value / size)];
}

function bytes(text) {
  const raw = atob(text), out = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) out[i] = raw.charCodeAt(i);
  return out.buffer;
}

// Places and smooth normals, one after the other, of a packed mesh.
function unpacked(mesh) {
  const packed = new Uint16Array(bytes(mesh.places)), count = packed.length / 3;
  const faces = count > 65535 ? new Uint32Array(bytes(mesh.faces)) : new Uint16Array(bytes(mesh.faces));
  const out = new Float32Array(count * 6);
  for (let i = 0; i < count; i++)
    for (let k = 0; k < 3; k++) out[i * 6 + k] = mesh.low[k] + (packed[i * 3 + k] / 65535) * mesh.size[k];
  for (let f = 0; f < faces.length; f += 3) {
    const [a, b, c] = [0, 1, 2].map((k) => Array.from(out.subarray(faces[f + k] * 6, faces[f + k] * 6 + 3)));
    const normal = V.cross(V.sub(b, a), V.sub(c, a));
    for (let k = 0; k < 3; k++)
      for (let i = 0; i < 3; i++) out[faces[f + k] * 6 + 3 + i] += normal[i];
  }
  return { vertices: out, faces };
}

// A thin tube along points, `sides` round, with normals; six indices a side and segment, in order.
function tube(points, radius, sides = 6) {
  const vertices = [], faces = [];
  points.forEach((point, i) => {
    const along = V.unit(V.sub(points[Math.min(i + 1, points.length - 1)], points[Math.max(i - 1, 0)]));
    const side = V.unit(V.cross(along, Math.abs(along[2]) < 0.9 ? [0, 0, 1] : [1, 0, 0]));
    const up = V.cross(side, along);
    for (let k = 0; k < sides; k++) {
      const angle = (2 * Math.PI * k) / sides;
      const out = V.add(V.by(side, Math.cos(angle)), V.by(up, Math.sin(angle)));
      vertices.push(...V.add(point, V.by(out, radius)), ...out);
      if (i) {
        const a = (i - 1) * sides + k, b = (i - 1) * sides + ((k + 1) % sides);
        faces.push(a, b, a + sides, b, b + sides, a + sides);
      }
    }
  });
  return { vertices: new Float32Array(vertices), faces: new Uint32Array(faces) };
}
