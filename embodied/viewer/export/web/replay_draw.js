// The episode in 3D: one light with a shadow, bodies at their poses, paths as tubes.
const SHADE = {
  vertex: `#version 300 es
    layout(location=0) in vec3 place; layout(location=1) in vec3 normal;
    uniform mat4 model, view, light;
    out vec3 at, facing; out vec4 lit;
    void main() {
      vec4 world = model * vec4(place, 1.0);
      at = world.xyz; facing = mat3(model) * normal; lit = light * world;
      gl_Position = view * world;
    }`,
  fragment: `#version 300 es
    precision highp float; precision highp sampler2DShadow;
    in vec3 at, facing; in vec4 lit;
    uniform vec4 colour; uniform vec3 eye, sun, middle; uniform float glow, floorlike, reach;
    uniform sampler2DShadow shadow;
    out vec4 seen;
    float sunlit() {
      vec3 p = lit.xyz / lit.w * 0.5 + 0.5;
      if (p.z > 1.0 || any(lessThan(p.xy, vec2(0.0))) || any(greaterThan(p.xy, vec2(1.0)))) return 1.0;
      float sum = 0.0, step = 1.0 / float(textureSize(shadow, 0).x);
      for (int i = -1; i <= 1; i++) for (int j = -1; j <= 1; j++)
        sum += texture(shadow, vec3(p.xy + vec2(i, j) * step, p.z - 0.0012));
      return sum / 9.0;
    }
    void main() {
      vec3 base = pow(colour.rgb, vec3(2.2)); float alpha = colour.a;
      vec3 way = normalize(eye - at), n = normalize(facing);
      if (dot(n, way) < 0.0) n = -n;
      if (floorlike > 0.0) {
        vec2 lines = abs(fract(at.xy / floorlike - 0.5) - 0.5) / max(fwidth(at.xy / floorlike), vec2(1e-6));
        base *= 1.0 - 0.28 * (1.0 - min(min(lines.x, lines.y), 1.0));
        alpha *= 1.0 - smoothstep(0.55, 1.0, length(at.xy - middle.xy) / reach);
      }
      float sky = 0.5 + 0.5 * n.z, key = max(dot(n, sun), 0.0) * sunlit();
      float fill = max(dot(n, normalize(vec3(-sun.y, sun.x, 0.35))), 0.0);
      float gloss = pow(max(dot(n, normalize(sun + way)), 0.0), 48.0) * sunlit() * (floorlike > 0.0 ? 0.0 : 0.22);
      vec3 shade = base * (mix(0.20, 0.46, sky) + 0.62 * key + 0.10 * fill) + vec3(gloss);
      seen = vec4(pow(mix(shade, base, glow), vec3(1.0 / 2.2)) * alpha, alpha);
    }`,
};
const DARK = {
  vertex: `#version 300 es
    layout(location=0) in vec3 place; uniform mat4 model, light;
    void main() { gl_Position = light * model * vec4(place, 1.0); }`,
  fragment: `#version 300 es
    precision highp float; void main() {}`,
};
const SHADOW = 2048;

class Drawing {
  constructor(canvas, data) {
    const gl = canvas.getContext("webgl2", { antialias: true, alpha: true, premultipliedAlpha: true, preserveDrawingBuffer: true });
    if (!gl) throw new Error("This browser has no WebGL 2: the scene cannot be drawn here.");
    Object.assign(this, { gl, canvas, data });
    this.shade = this.program(SHADE, ["model", "view", "light", "colour", "eye", "sun", "middle", "glow", "floorlike", "reach", "shadow"]);
    this.dark = this.program(DARK, ["model", "light"]);
    this.meshes = data.meshes.map((mesh) => this.upload(unpacked(mesh)));
    this.map = this.shadowMap();
    this.measure();
    this.lanes = data.lanes.map((lane) => this.prepared(lane));
    this.home();
  }

  program(source, names) {
    const gl = this.gl, made = gl.createProgram();
    for (const [kind, text] of [[gl.VERTEX_SHADER, source.vertex], [gl.FRAGMENT_SHADER, source.fragment]]) {
      const shader = gl.createShader(kind);
      gl.shaderSource(shader, text);
      gl.compileShader(shader);
      if (!gl.getShaderParameter(shader, gl.COMPILE_STATUS)) throw new Error(gl.getShaderInfoLog(shader));
      gl.attachShader(made, shader);
    }
    gl.linkProgram(made);
    const at = Object.fromEntries(names.map((name) => [name, gl.getUniformLocation(made, name)]));
    return { made, at };
  }

  upload({ vertices, faces }) {
    const gl = this.gl, array = gl.createVertexArray();
    gl.bindVertexArray(array);
    gl.bindBuffer(gl.ARRAY_BUFFER, gl.createBuffer());
    gl.bufferData(gl.ARRAY_BUFFER, vertices, gl.STATIC_DRAW);
    for (const [place, offset] of [[0, 0], [1, 12]]) {
      gl.enableVertexAttribArray(place);
      gl.vertexAttribPointer(place, 3, gl.FLOAT, false, 24, offset);
    }
    gl.bindBuffer(gl.ELEMENT_ARRAY_BUFFER, gl.createBuffer());
    gl.bufferData(gl.ELEMENT_ARRAY_BUFFER, faces, gl.STATIC_DRAW);
    gl.bindVertexArray(null);
    return { array, count: faces.length, kind: faces.BYTES_PER_ELEMENT === 4 ? gl.UNSIGNED_INT : gl.UNSIGNED_SHORT };
  }

  shadowMap() {
    const gl = this.gl, texture = gl.createTexture(), frame = gl.createFramebuffer();
    gl.bindTexture(gl.TEXTURE_2D, texture);
    gl.texImage2D(gl.TEXTURE_2D, 0, gl.DEPTH_COMPONENT24, SHADOW, SHADOW, 0, gl.DEPTH_COMPONENT, gl.UNSIGNED_INT, null);
    for (const [name, value] of [
      [gl.TEXTURE_MIN_FILTER, gl.LINEAR], [gl.TEXTURE_MAG_FILTER, gl.LINEAR],
      [gl.TEXTURE_COMPARE_MODE, gl.COMPARE_REF_TO_TEXTURE],
      [gl.TEXTURE_WRAP_S, gl.CLAMP_TO_EDGE], [gl.TEXTURE_WRAP_T, gl.CLAMP_TO_EDGE],
    ]) gl.texParameteri(gl.TEXTURE_2D, name, value);
    gl.bindFramebuffer(gl.FRAMEBUFFER, frame);
    gl.framebufferTexture2D(gl.FRAMEBUFFER, gl.DEPTH_ATTACHMENT, gl.TEXTURE_2D, texture, 0);
    gl.bindFramebuffer(gl.FRAMEBUFFER, null);
    return { texture, frame };
  }

  // The middle of what moves, and how far it reaches: for the light and the floor's fading.
  measure() {
    const { target, place, reach } = this.data.eye;
    this.reach = reach;
    this.middle = target;
    this.sun = V.unit([0.42, -0.5, 0.95]);
    this.first = { target, place };
  }

  prepared(lane) {
    const paths = (lane.paths || []).map((each) => ({
      at: each.at,
      tubes: each.lines.map((line, i) => this.upload(tube(line, this.reach * (i ? 0.0035 : 0.0075)))),
    }));
    const trail = lane.trail ? this.upload(tube(lane.trail, this.reach * 0.004)) : null;
    return { ...lane, poses: new Float32Array(bytes(lane.poses)), paths, trail };
  }

  home() {
    const away = V.sub(this.first.place, this.first.target);
    this.camera = {
      target: [...this.first.target], away: V.size(away),
      around: Math.atan2(away[1], away[0]), up: Math.asin(away[2] / V.size(away)),
    };
  }

  turn(dx, dy) {
    this.camera.around -= dx * 0.008;
    this.camera.up = Math.min(1.5, Math.max(-1.2, this.camera.up + dy * 0.008));
  }

  zoom(factor) {
    this.camera.away = Math.min(this.reach * 12, Math.max(this.reach * 0.12, this.camera.away * factor));
  }

  shift(dx, dy) {
    const { around, away, up } = this.camera, scale = away * 0.0014;
    const side = [-Math.sin(around), Math.cos(around), 0];
    const rise = [-Math.cos(around) * Math.sin(up), -Math.sin(around) * Math.sin(up), Math.cos(up)];
    this.camera.target = V.add(this.camera.target, V.add(V.by(side, -dx * scale), V.by(rise, dy * scale)));
  }

  draw(time) {
    const gl = this.gl, ratio = Math.min(window.devicePixelRatio || 1, 2);
    const wide = Math.round(this.canvas.clientWidth * ratio), high = Math.round(this.canvas.clientHeight * ratio);
    if (this.canvas.width !== wide || this.canvas.height !== high) Object.assign(this.canvas, { width: wide, height: high });
    gl.bindFramebuffer(gl.FRAMEBUFFER, null);
    gl.clearColor(0, 0, 0, 0);
    gl.clear(gl.COLOR_BUFFER_BIT | gl.DEPTH_BUFFER_BIT);
    const across = wide / high > 0.9, n = this.lanes.length;
    this.lanes.forEach((lane, i) => {
      const [w, h] = across ? [wide / n, high] : [wide, high / n];
      this.lane(lane, time, across ? [i * w, 0, w, h] : [0, (n - 1 - i) * h, w, h]);
    });
  }

  lane(lane, time, [x, y, wide, high]) {
    const gl = this.gl, models = this.models(lane, time), { followed } = this.data;
    let middle = this.camera.target;
    if (followed) middle = V.add(middle, V.sub(this.spot(lane, followed, time), this.spot(lane, followed, 0)).map((v, i) => v * followed.along[i]));
    const { around, up, away } = this.camera;
    const eye = V.add(middle, V.by([Math.cos(around) * Math.cos(up), Math.sin(around) * Math.cos(up), Math.sin(up)], away));
    // A window higher than wide sees as much across as a square one.
    const fov = 2 * Math.atan(Math.tan((this.data.eye.fov || 0.8) / 2) * Math.max(1, high / wide));
    const view = M.times(M.perspective(fov, wide / high, this.reach * 0.02, this.reach * 60), M.look(eye, middle, [0, 0, 1]));
    const centre = followed ? middle : this.middle, far = this.reach * 6;
    const light = M.times(M.box(this.reach * 1.7, 0, far * 2), M.look(V.add(centre, V.by(this.sun, far)), centre, [0, 1, 0]));
    this.cast(models, light);
    gl.viewport(x, y, wide, high);
    gl.enable(gl.DEPTH_TEST);
    gl.enable(gl.BLEND);
    gl.blendFunc(gl.ONE, gl.ONE_MINUS_SRC_ALPHA);
    const { made, at } = this.shade;
    gl.useProgram(made);
    gl.uniformMatrix4fv(at.view, false, view);
    gl.uniformMatrix4fv(at.light, false, light);
    gl.uniform3fv(at.eye, eye);
    gl.uniform3fv(at.sun, this.sun);
    gl.uniform3fv(at.middle, centre);
    gl.uniform1f(at.reach, this.reach * 4);
    gl.activeTexture(gl.TEXTURE0);
    gl.bindTexture(gl.TEXTURE_2D, this.map.texture);
    gl.uniform1i(at.shadow, 0);
    const solid = (each) => each.shape.rgba[3] >= 1 && !each.shape.floor;
    for (const each of [...models.filter(solid), ...models.filter((one) => !solid(one))]) {
      gl.uniform1f(at.glow, 0);
      gl.uniform1f(at.floorlike, each.shape.floor || 0);
      gl.uniform4fv(at.colour, each.shape.rgba);
      this.put(at.model, each.model, this.meshes[each.shape.mesh]);
    }
    // Faint through what hides them, then as they are.
    gl.disable(gl.DEPTH_TEST);
    this.paths(lane, time, at, 0.3);
    gl.enable(gl.DEPTH_TEST);
    this.paths(lane, time, at, 1);
  }

  // What was planned at the last decision, and where the tool has been.
  paths(lane, time, at, share) {
    const gl = this.gl, none = M.pose([0, 0, 0], [1, 0, 0, 0]);
    gl.uniform1f(at.floorlike, 0);
    gl.uniform1f(at.glow, 0.75);
    if (lane.trail && this.shows) {
      gl.uniform4fv(at.colour, [0.0, 0.45, 0.7, share]);
      const part = Math.floor(Math.min(time, lane.steps)) * 36;
      this.put(at.model, none, { ...lane.trail, count: Math.min(part, lane.trail.count) });
    }
    const now = lane.paths.filter((each) => each.at <= time + 1e-6).pop();
    if (!now || !this.shows) return;
    now.tubes.forEach((each, i) => {
      gl.uniform4fv(at.colour, i ? [0.95, 0.62, 0.1, 0.6 * share] : [0.84, 0.33, 0.0, share]);
      this.put(at.model, none, each);
    });
  }

  cast(models, light) {
    const gl = this.gl;
    gl.bindFramebuffer(gl.FRAMEBUFFER, this.map.frame);
    gl.viewport(0, 0, SHADOW, SHADOW);
    gl.clear(gl.DEPTH_BUFFER_BIT);
    gl.enable(gl.DEPTH_TEST);
    gl.useProgram(this.dark.made);
    gl.uniformMatrix4fv(this.dark.at.light, false, light);
    for (const each of models)
      if (!each.shape.floor && each.shape.rgba[3] > 0.5) this.put(this.dark.at.model, each.model, this.meshes[each.shape.mesh]);
    gl.bindFramebuffer(gl.FRAMEBUFFER, null);
  }

  put(where, model, mesh) {
    const gl = this.gl;
    gl.uniformMatrix4fv(where, false, model);
    gl.bindVertexArray(mesh.array);
    gl.drawElements(gl.TRIANGLES, mesh.count, mesh.kind, 0);
  }

  models(lane, time) {
    const bodies = [];
    for (let body = 0; body < lane.bodies; body++) bodies.push(M.pose(...this.at(lane, body, time)));
    return lane.shapes.map((shape) => ({ shape, model: M.times(bodies[shape.body], M.pose(shape.place, shape.turn)) }));
  }

  at(lane, body, time) {
    const last = lane.frames - 1, frame = Math.min(time / lane.stride, last), a = Math.floor(frame), b = Math.min(a + 1, last);
    const width = lane.bodies * 7;
    return between(lane.poses, a * width + body * 7, b * width + body * 7, frame - a);
  }

  spot(lane, followed, time) {
    return this.at(lane, followed.body, time)[0];
  }
}
